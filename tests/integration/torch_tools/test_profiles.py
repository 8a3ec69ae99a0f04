"""Profiles with stacks, memory by category, traces, and trackers of modules."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mod_tracker import ModTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.integration.networks import NETWORKS, make_batch, make_net


def inside(stack: list[str]) -> list[str]:
    """Return the part of a stack that is inside of the call in this file, without addresses."""
    lines = [re.sub("0x[0-9a-f]+", "0x", line) for line in stack]
    here = next(number for number, line in enumerate(lines) if Path(__file__).name in line)
    return lines[:here]


@for_each("name", NETWORKS)
def test_operations_and_their_stacks(name: str) -> None:
    """Each operation has the Python stack of torch, without frames of modkit."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, name), make_batch(name)
        with profile(
            activities=[ProfilerActivity.CPU],
            with_stack=True,
            record_shapes=True,
            experimental_config=torch._C._profiler._ExperimentalConfig(verbose=True),
        ) as found:
            net(batch)
        events = [event for event in found.events() if event.name.startswith("aten::")]
        assert all("modkit/" not in line for event in events for line in event.stack)
        shapes = [(event.name, event.input_shapes) for event in events]
        names = {event.name for event in events}
        groups = found.key_averages(group_by_input_shape=True)
        stacks = [inside(event.stack) for event in events]
        return shapes, stacks, sorted((e.key, e.count) for e in groups if e.key in names)

    assert "forward" in str(same(scenario))


@for_each("tracker", [ModuleTracker, ModTracker])
def test_trackers_name_the_modules(tracker: Any) -> None:
    """In the forward and in the backward pass, each operation has the modules of torch."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        tracked, seen = tracker(), []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append((str(function), sorted(tracked.parents), tracked.is_bw))
                return function(*args, **(kwargs or {}))

        with tracked, Watch():
            net(batch).sum().backward()
        return seen

    assert "NestedNet.blocks.0.linear" in str(same(scenario))


# Torch 2.15 records modules with stacks.
@pytest.mark.filterwarnings("ignore:with_modules is deprecated")
def test_a_trace_names_the_modules_of_the_user(tmp_path: Path) -> None:
    """A chrome trace with stacks and modules has an entry for each call of each module."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        net.heads["left"].register_forward_hook(lambda _module, _args, output: output * 2)
        path = tmp_path / f"{impl.name}.json"
        with profile(
            activities=[ProfilerActivity.CPU], with_stack=True, with_modules=True
        ) as found:
            net(batch)
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        names = (str(event.get("name")) for event in events)
        return sorted(name for name in names if name.startswith("nn.Module: "))

    found = str(same(scenario))

    for name in ("Block_0", "Block_1", "Linear_3", "NestedNet_0"):
        assert f"nn.Module: {name}" in found
