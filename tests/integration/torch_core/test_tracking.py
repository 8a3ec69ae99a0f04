from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net


hooks = torch.nn.modules.module


@pytest.fixture(autouse=True)
def _global_tables() -> Iterator[None]:
    """Check that every tracker takes its global hooks off again."""
    yield
    tables = [
        hooks._global_forward_hooks,
        hooks._global_forward_pre_hooks,
        hooks._global_backward_hooks,
        hooks._global_backward_pre_hooks,
    ]

    assert not any(tables)


@pytest.mark.parametrize("network", ["conv", "transformer", "nested"])
def test_flop_counter(network: str) -> None:
    """Operations are counted under the same module names, forward and backward."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        with FlopCounterMode(display=False) as counter:
            net(batch).sum().backward()
        counts = {
            name: sorted((str(op), number) for op, number in row.items())
            for name, row in counter.get_flop_counts().items()
        }
        return counter.get_total_flops(), counts

    total, counts = agree(scenario)

    assert total > 0
    assert len(counts) > 2


def test_module_tracker() -> None:
    """The tracker knows in which modules an operation of forward and of backward runs."""

    def scenario(impl: Implementation) -> list[Any]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        seen: list[Any] = []
        tracker = ModuleTracker()

        class Note(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                seen.append(("forward", sorted(tracker.parents)))
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                seen.append(("backward", tracker.is_bw, sorted(tracker.parents)))
                return grad

        act = net.blocks[1].act
        plain = act.forward
        act.forward = lambda x: plain(Note.apply(x))
        with tracker:
            net(batch).sum().backward()
        return seen

    forward, backward = agree(scenario)

    assert "NestedNet.blocks.1.act" in forward[1]
    assert backward[1] is True


def test_checkpointing() -> None:
    """Activation checkpointing recomputes blocks and gives torch's gradients and statistics."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        calls: list[str] = []
        net.blocks[0].linear.register_forward_hook(lambda *_args: calls.append("linear"))
        hidden = checkpoint(net.blocks[0], batch, use_reentrant=False)
        hidden = checkpoint(net.blocks[1], hidden, use_reentrant=False)
        output = net.heads["left"](hidden) + net.heads["right"](hidden)
        output.square().sum().backward()
        return output, gradients(net), calls

    _, grads, calls = agree(scenario)

    net = make_net(torch.nn, "nested")
    hidden = net.blocks[1](net.blocks[0](make_batch("nested")))
    (net.heads["left"](hidden) + net.heads["right"](hidden)).square().sum().backward()
    assert freeze(grads) == freeze(gradients(net))
    assert calls == ["linear", "linear"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_dropout_and_sequential(use_reentrant: bool) -> None:
    """The recomputation draws the same random numbers, segment by segment."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn = impl.nn
        net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
        batch = make_batch("free").requires_grad_()
        output = checkpoint_sequential(net, 2, batch, use_reentrant=use_reentrant)
        output.square().sum().backward()
        return output, gradients(net), batch.grad

    _, grads, _ = agree(scenario)

    assert all(grad.any() for grad in grads.values())


@for_each("network", NETWORKS)
def test_saved_tensor_hooks(network: str) -> None:
    """Saved tensors of autograd can be packed and unpacked, and the graph has torch's nodes."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        packed: list[Any] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append((tuple(tensor.shape), isinstance(tensor, torch.nn.Parameter)))
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = net(batch)
        names = graph_names(output)
        output.sum().backward()
        return output, gradients(net), packed, names

    _, _, packed, _ = agree(scenario)

    assert len(packed) >= 2


def graph_names(output: Tensor) -> list[str]:
    """Name the nodes of an autograd graph, from the output to the leaves."""
    names, waiting, seen = [], [output.grad_fn], set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        waiting.extend(following for following, _ in node.next_functions)
    return names


def test_autograd_graph_helpers() -> None:
    """Multi-gradient hooks and edges of the graph work with a module's parameters."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        seen: list[Any] = []
        watched = list(net.heads.parameters())
        handle = torch.autograd.graph.register_multi_grad_hook(watched, seen.append)
        with torch.autograd.graph.save_on_cpu():
            output = net(batch)
        output.sum().backward()
        handle.remove()
        edge = torch.autograd.graph.get_gradient_edge(net.heads["left"].weight)
        return seen, edge.node.name()

    (grads,), _ = agree(scenario)

    assert len(grads) == 4


def test_global_hooks_see_every_call() -> None:
    """Hooks registered for all modules through torch see modkit's modules."""

    def scenario(impl: Implementation) -> list[str]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        seen: list[str] = []
        handles = [
            hooks.register_module_forward_pre_hook(
                lambda m, _args: seen.append(f"before {type(m).__name__}")
            ),
            hooks.register_module_forward_hook(
                lambda m, _args, _output: seen.append(f"after {type(m).__name__}")
            ),
            hooks.register_module_full_backward_hook(
                lambda m, _grad_in, _grad_out: seen.append(f"backward {type(m).__name__}")
            ),
        ]
        net(batch.requires_grad_()).sum().backward()
        for handle in handles:
            handle.remove()
        return seen

    seen = agree(scenario)

    assert seen[:2] == ["before NestedNet", "before Block"]
    assert seen[-1] == "backward NestedNet"


def test_registration_hooks_see_every_member() -> None:
    """Registration hooks put on through torch see members of modkit's modules, and replace them."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        seen: list[Any] = []

        def note(_module: torch.nn.Module, name: str, value: Any) -> Any:
            seen.append((name, type(value).__name__))
            if isinstance(value, torch.nn.Parameter):
                return torch.nn.Parameter(torch.zeros_like(value))
            return None

        handles = [
            hooks.register_module_parameter_registration_hook(note),
            hooks.register_module_buffer_registration_hook(note),
            hooks.register_module_module_registration_hook(note),
        ]
        net = make_net(impl.nn, "free")
        for handle in handles:
            handle.remove()
        return seen, dict(net.named_parameters())

    seen, parameters = agree(scenario)

    assert ("inner", "Linear") in seen
    assert ("counter", "Tensor") in seen
    assert torch.equal(parameters["w"], torch.zeros(6))


def test_profiler_scopes() -> None:
    """The profiler records the same operations for a network."""

    def scenario(impl: Implementation) -> list[Any]:
        net, batch = make_net(impl.nn, "conv"), make_batch("conv")
        net(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            net(batch)
        return sorted((event.key, event.count) for event in profile.key_averages())

    names = dict(agree(scenario))

    assert names["aten::convolution"] == 2
