"""Profiles with stacks, memory by category, execution traces and trackers of modules."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function
from torch.profiler._memory_profiler import (
    _CATEGORY_TO_INDEX,
    Category,
    MemoryProfileTimeline,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.integration.networks import NETWORKS, make_batch, make_net


def step(net: torch.nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Train one step."""
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()


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


def test_memory_by_category() -> None:
    """The timeline of memory has as many bytes of parameters, gradients and states of the optimizer."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        optimizer = torch.optim.Adam(net.parameters())
        with profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            record_shapes=True,
            with_stack=True,
        ) as found:
            with record_function("step"):
                step(net, batch, optimizer)
            step(net, batch, optimizer)
        _, sizes = MemoryProfileTimeline(found._memory_profile())._coalesce_timeline("cpu")
        # The most bytes of each category; the first column is for what has none.
        return [int(max(column)) for column in zip(*sizes, strict=True)]

    largest = [int(value) for _, value in same(scenario)[1][1]]
    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE):
        assert largest[_CATEGORY_TO_INDEX[category] + 1] > 0


def test_an_execution_trace_has_the_nodes_of_torch(tmp_path: Path) -> None:
    """The file of ExecutionTraceObserver, which simulators replay, has the same nodes."""

    def scenario(impl: Implementation) -> Any:
        path = tmp_path / f"{impl}.json"
        net, batch = make_net(impl.nn, "conv"), make_batch("conv")
        observer = ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        net(batch).sum().backward()
        observer.stop()
        observer.unregister_callback()
        nodes = json.loads(path.read_text())["nodes"]
        return [
            (node["name"], node["inputs"]["shapes"], node["outputs"]["shapes"]) for node in nodes
        ]

    assert "aten::convolution" in str(same(scenario))


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


def test_the_memory_tracker_counts_by_module() -> None:
    """MemTracker counts the memory of each module of a step as in torch."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "conv"), make_batch("conv")
        optimizer = torch.optim.Adam(net.parameters())
        tracker = MemTracker()
        tracker.track_external(net, optimizer, batch)
        with tracker:
            step(net, batch, optimizer)
        modules = {
            stats.mod_fqn: str(stats.snapshots) for stats in tracker.memory_tracking.values()
        }
        return modules, str(tracker.get_tracker_snapshot("peak"))

    assert "ConvNet.features" in str(same(scenario))


def test_debug_mode_records_the_calls_of_modules() -> None:
    """DebugMode writes the modules and operations of torch."""
    debug_mode = __import__("torch.utils._debug_mode", fromlist=["DebugMode"])

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        with debug_mode.DebugMode(record_nn_module=True) as mode:
            net(batch)
        return mode.debug_string()

    assert "NestedNet" in str(same(scenario))
