from typing import Any

import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torchscript import layout, neutral, scripted_tests


pytestmark = scripted_tests


@for_each("network", NETWORKS)
@for_each("training", [True, False], ids=["train", "eval"])
def test_script(network: str, training: bool) -> None:
    """Each network scripts to torch's code, and computes outputs and gradients from it."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network).train(training), make_batch(network)
        scripted = torch.jit.script(net)
        outputs = [scripted(batch), scripted(batch)]
        outputs[1].square().sum().backward()
        names = [(name, module.original_name) for name, module in scripted.named_modules()]
        return (
            [output.detach() for output in outputs],
            gradients(scripted),
            dict(scripted.state_dict()),
            (scripted.code, neutral(scripted.inlined_graph), layout(scripted), names),
        )

    outputs, grads, state, _ = agree(scenario)

    eager = make_net(torch.nn, network).train(training)
    expected = [eager(make_batch(network)), eager(make_batch(network))]
    expected[1].square().sum().backward()
    torch.testing.assert_close(outputs, [output.detach() for output in expected])
    torch.testing.assert_close(grads, gradients(eager))
    # TorchScript keeps buffers that are not persistent in its state, too.
    members = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    torch.testing.assert_close(state, {name: members[name].detach() for name in state})
    assert state.keys() == members.keys()


def test_annotated_user_class() -> None:
    """Constants, typed attributes, exported and ignored methods and loops over children compile."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn = impl.nn

        class Tower(nn.Module):
            __constants__ = ["repeats"]
            factor: torch.jit.Final[float]
            seen: list[int]

            def __init__(self) -> None:
                super().__init__()
                self.repeats = 2
                self.factor = 0.5
                self.seen = []
                self.floors = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
                self.named = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})
                self.stack = nn.Sequential(nn.Linear(6, 6), nn.Hardswish(), nn.Linear(6, 6))
                self.optional = None
                self.register_buffer("nothing", None)
                self.register_parameter("no_weight", None)

            def forward(self, x: Tensor) -> Tensor:
                for index, floor in enumerate(self.floors):
                    x = floor(x) * self.factor
                    self.seen.append(index)
                for name, act in self.named.items():
                    x = act(x) if name == "a" else act(x) + 1
                for layer in self.stack:
                    x = layer(x)
                for _ in range(self.repeats):
                    x = self.floors[0](x)
                if self.optional is None and self.nothing is None and self.no_weight is None:
                    x = self.describe(x)
                return x

            @torch.jit.export
            def depth(self) -> int:
                return len(self.floors) + len(self.stack) + len(self.named)

            @torch.jit.ignore
            def describe(self, x: Tensor) -> Tensor:
                return x.clone()

            @torch.jit.unused
            def other(self, x: Tensor) -> Tensor:
                raise NotImplementedError

        net, batch = Tower(), make_batch("free")
        scripted = torch.jit.script(net)
        result = scripted(batch)

        assert torch.equal(result, net(batch))

        return result, scripted.depth(), scripted.seen, scripted.code, layout(scripted)

    _, depth, seen, _, _ = agree(scenario)

    assert depth == 8
    assert seen == [0, 1, 2]
