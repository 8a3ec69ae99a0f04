from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from tests.helpers import Implementation, freeze
from tests.integration.networks import agree
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = compiled_tests

HOOKS: dict[str, Callable[[Any], None]] = {
    "full": lambda m: m.register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,)),
    "pre": lambda m: m.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
    "both": lambda m: (HOOKS["full"](m), HOOKS["pre"](m)),
}


def backward_pass(net: torch.nn.Module, *, forward: bool, backward: bool) -> list[Tensor | None]:
    """Return all gradients of one step, whose passes are compiled or not, each to one graph."""
    x = torch.ones(2, 3, requires_grad=True)
    call = torch.compile(net, backend="eager", fullgraph=True) if forward else net
    compiler = torch.compile(backend="eager", fullgraph=True)
    with compiled_autograd._enable(compiler) if backward else torch.enable_grad():
        call(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


def hooked_net(impl: Implementation, register: Callable[[Any], None]) -> torch.nn.Module:
    """Build a small network whose last layer has hooks."""
    net = impl.nn.Sequential(impl.nn.Linear(3, 3), impl.nn.Tanh(), impl.own.Linear(3, 2))
    register(net[2])
    return net


@pytest.mark.parametrize("forward", [False, True], ids=["eager", "compiled"])
def test_hooks_in_a_compiled_backward_pass(forward: bool) -> None:
    """Compiled autograd calls full backward hooks, of compiled and of uncompiled modules."""

    def scenario(impl: Implementation) -> list[Tensor | None]:
        return backward_pass(hooked_net(impl, HOOKS["both"]), forward=forward, backward=True)

    gradients = agree(scenario)

    assert len(gradients) == 5
    assert all(gradient is not None and gradient.count_nonzero() for gradient in gradients)


@pytest.mark.parametrize("kind", HOOKS)
def test_compiled_backward_passes_are_the_eager_one(impl: Implementation, kind: str) -> None:
    """Gradients do not depend on what is compiled."""
    net = hooked_net(impl, HOOKS[kind])
    results = []
    for forward, backward in [(False, False), (False, True), (True, True)]:
        net.zero_grad()
        results.append(freeze(backward_pass(net, forward=forward, backward=backward)))

    assert results[1:] == results[:1] * 2


def test_hooks_break_the_graph_without_compiled_autograd() -> None:
    """Without it, a module with full backward hooks cannot be part of one graph."""

    def scenario(impl: Implementation) -> str:
        net = hooked_net(impl, HOOKS["both"])
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            backward_pass(net, forward=True, backward=False)
        return str(caught.value).partition("\n")[0]

    assert "require compiled autograd" in agree(scenario)


def test_hooks_after_a_graph_break() -> None:
    """Code that is compiled around the hooks gives the gradients of code that is not."""

    def scenario(impl: Implementation) -> tuple[list[Tensor | None], ...]:
        net = hooked_net(impl, HOOKS["both"])
        expected = backward_pass(net, forward=False, backward=False)
        net.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        torch.compile(net, backend="eager")(x).square().sum().backward()
        return expected, [x.grad, *(parameter.grad for parameter in net.parameters())]

    expected, compiled = agree(scenario)

    assert freeze(compiled) == freeze(expected)


@pytest.mark.parametrize("forward", [False, True], ids=["eager", "compiled"])
def test_pre_hook_may_return_a_bare_tensor_when_compiled(
    impl: Implementation, forward: bool
) -> None:
    """One tensor from a pre-hook is the gradient of the one output in compiled code too."""
    in_a_tuple = hooked_net(impl, HOOKS["pre"])
    bare = hooked_net(impl, lambda m: m.register_full_backward_pre_hook(lambda _, go: go[0] * 3))
    bare.load_state_dict(in_a_tuple.state_dict())
    expected = backward_pass(in_a_tuple, forward=forward, backward=True)
    torch._dynamo.reset()

    assert freeze(backward_pass(bare, forward=forward, backward=True)) == freeze(expected)
