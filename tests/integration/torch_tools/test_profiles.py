"""Profiles with stacks, memory by category, traces, and trackers of modules."""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.profiler._memory_profiler import (
    _CATEGORY_TO_INDEX,
    Category,
    MemoryProfileTimeline,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
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


def memory_by_category(net: Any, step: Callable[[], None], file: Path) -> Any:
    """Return the most bytes of each category of tensors that outlive an operation.

    The others are left out: once in many runs, torch found another category, or none, for a
    temporary number of four bytes.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as found:
        step()
        step()
    _, sizes = MemoryProfileTimeline(found._memory_profile())._coalesce_timeline("cpu")
    columns = list(zip(*sizes, strict=True))
    names = ("PARAMETER", "GRADIENT", "OPTIMIZER_STATE", "ACTIVATION")
    indices = [_CATEGORY_TO_INDEX[Category[name]] + 1 for name in names]
    largest = [int(max(columns[index])) for index in indices]
    return [size > 0 for size in largest], largest


def execution_trace(net: Any, step: Callable[[], None], file: Path) -> Any:
    """Return the nodes of a file that simulators replay."""
    observer = ExecutionTraceObserver().register_callback(str(file))
    observer.start()
    step()
    observer.stop()
    observer.unregister_callback()
    nodes = json.loads(file.read_text())["nodes"]
    return [(node["name"], node["inputs"]["shapes"], node["outputs"]["shapes"]) for node in nodes]


def memory_tracker(net: Any, step: Callable[[], None], file: Path) -> Any:
    """Return the memory of each module."""
    tracker = MemTracker()
    tracker.track_external(net)
    with tracker:
        step()
    modules = tracker.memory_tracking.values()
    peak = str(tracker.get_tracker_snapshot("peak"))
    return {stats.mod_fqn: str(stats.snapshots) for stats in modules}, peak


def debug_mode(net: Any, step: Callable[[], None], file: Path) -> Any:
    """Return the modules and operations that DebugMode writes."""
    modes = __import__("torch.utils._debug_mode", fromlist=["DebugMode"])
    with modes.DebugMode(record_nn_module=True) as mode:
        step()
    return mode.debug_string()


def flop_counter(net: Any, step: Callable[[], None], file: Path) -> Any:
    """Return the number of operations by module, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts().items()
    return {name: sorted((str(op), n) for op, n in row.items()) for name, row in counts}


@for_each(
    ("tool", "shown"),
    [
        (memory_by_category, str([("bool", "True")] * 4)),
        (execution_trace, "aten::addmm"),
        (memory_tracker, "NestedNet.blocks.0"),
        *([(debug_mode, "NestedNet")] if find_spec("torch.utils._debug_mode") else []),
        (flop_counter, "NestedNet.heads.left"),
    ],
)
def test_a_tool_finds_in_a_step_what_it_finds_in_torch(
    tool: Callable[..., Any], shown: str, tmp_path: Path
) -> None:
    """Memory, nodes and operations of a training step are those of torch, by the same modules."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        optimizer = torch.optim.Adam(net.parameters())

        def step() -> None:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()

        return tool(net, step, tmp_path / f"{impl}.json")

    assert shown in str(same(scenario))
