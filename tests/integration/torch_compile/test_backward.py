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


def register_both(module: Any) -> None:
    """Register a full backward hook and a pre-hook that change the gradients."""
    module.register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,))
    module.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,))


def backward_pass(
    impl: Implementation, register: Callable[[Any], object], *, forward: bool, backward: bool
) -> list[Tensor | None]:
    """Return all gradients of a small network whose last layer has hooks.

    Each of the two passes is compiled or not, to one graph.
    """
    torch.manual_seed(0)
    net = impl.nn.Sequential(impl.nn.Linear(3, 3), impl.nn.Tanh(), impl.own.Linear(3, 2))
    register(net[2])
    x = torch.ones(2, 3, requires_grad=True)
    call = torch.compile(net, backend="eager", fullgraph=True) if forward else net
    compiler = torch.compile(backend="eager", fullgraph=True)
    with compiled_autograd._enable(compiler) if backward else torch.enable_grad():
        call(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("forward", [False, True], ids=["eager", "compiled"])
def test_hooks_in_a_compiled_backward_pass(forward: bool) -> None:
    """Compiled autograd calls full backward hooks, of compiled and of uncompiled modules."""

    def scenario(impl: Implementation) -> list[Tensor | None]:
        return backward_pass(impl, register_both, forward=forward, backward=True)

    gradients = agree(scenario)

    eager = backward_pass(Implementation("torch"), register_both, forward=False, backward=False)
    assert freeze(gradients) == freeze(eager)
    assert all(gradient is not None and gradient.count_nonzero() for gradient in gradients)


@pytest.mark.parametrize("forward", [False, True], ids=["eager", "compiled"])
def test_pre_hook_may_return_a_bare_tensor_when_compiled(
    impl: Implementation, forward: bool
) -> None:
    """One tensor from a pre-hook is the gradient of the one output in compiled code too."""
    expected = backward_pass(
        impl,
        lambda m: m.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
        forward=False,
        backward=False,
    )
    gradients = backward_pass(
        impl,
        lambda m: m.register_full_backward_pre_hook(lambda _, go: go[0] * 3),
        forward=forward,
        backward=True,
    )

    assert freeze(gradients) == freeze(expected)
