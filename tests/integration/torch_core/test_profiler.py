import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import Implementation
from tests.integration.networks import agree


def user_net(impl: Implementation) -> torch.nn.Module:
    """Return a network of three classes of a user, one of them with a hook."""

    class Block(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = impl.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out

    class Head(impl.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    class Net(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = impl.nn.Sequential(Block(), Block())
            self.head = Head()
            self.head.register_forward_hook(lambda _module, _args, output: output * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.blocks(x))
            return out

    net: torch.nn.Module = Net()
    return net


# Torch 2.15 records modules with stacks.
@pytest.mark.filterwarnings("ignore:with_modules is deprecated")
def test_a_trace_names_the_modules_of_the_user(tmp_path: Path) -> None:
    """A chrome trace with stacks and modules has an entry for each call of each module, as torch's."""

    def scenario(impl: Implementation) -> list[str]:
        net, path = user_net(impl), tmp_path / f"{impl.name}.json"
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True, with_modules=True
        ) as profile:
            net(torch.ones(1, 2))
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        names = (str(event.get("name")) for event in events)
        return sorted(name for name in names if name.startswith("nn.Module: "))

    assert agree(scenario) == [
        *("nn.Module: Block_0", "nn.Module: Block_1", "nn.Module: Head_0"),
        *("nn.Module: Linear_0", "nn.Module: Linear_1"),
        *("nn.Module: Net_0", "nn.Module: Sequential_0"),
    ]
