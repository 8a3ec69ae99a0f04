import pytest
import torch

from tests.helpers import Implementation
from tests.models import function_module
from tests.parity.hooks.tools import leaf, returning


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 2), (2, 2)], ids=repr)
@pytest.mark.parametrize("pack", [lambda y: y, lambda y: (y,)], ids=["tensor", "tuple"])
def test_pre_hook_may_return_a_bare_tensor(impl: Implementation, shape, pack) -> None:
    """One tensor is the new gradient of the one output, and goes to the next hooks in a tuple."""
    seen: list[object] = []
    module = function_module(impl, lambda x: pack(x * 2))
    module.register_full_backward_pre_hook(lambda _, go: go[0] * 3)
    module.register_full_backward_pre_hook(lambda _, go: seen.append(go))
    module.register_full_backward_hook(lambda _, gi, go: seen.append(go))
    x = torch.ones(shape, requires_grad=True)
    result = module(x)
    (result[0] if isinstance(result, tuple) else result).sum().backward()

    assert torch.equal(x.grad, torch.full(shape, 6.0))
    assert all(isinstance(go, tuple) and len(go) == 1 for go in seen)
    assert all(torch.equal(go[0], torch.full(shape, 3.0)) for go in seen)
    assert len(seen) == 2


def test_pre_hook_that_returns_a_bare_tensor_for_two_outputs_is_an_error(
    impl: Implementation,
) -> None:
    """A tensor is never taken apart to make up for the number of outputs."""
    module = function_module(impl, lambda x: (x * 2, x * 3))
    module.register_full_backward_pre_hook(returning(torch.ones(2)))
    first, second = module(leaf(1.0, 2.0))

    with pytest.raises(RuntimeError, match="number of grad_output, got 1, but expected 2"):
        (first + second).sum().backward()
