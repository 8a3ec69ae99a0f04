from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import capturing, leaf, returning


# A call, and what it does with forward and backward hooks, is torch's own code: all but the list of
# full backward pre-hooks.


def plain(value: object) -> object:
    """Turn nested gradients into plain data; they may be expanded, which `freeze` cannot view."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    return value


def observed(impl: Implementation, forward) -> tuple[Any, list[object]]:
    """Make a module whose pre-hooks and full hooks note all the gradients they are given."""
    seen: list[object] = []
    module = function_module(impl, forward)
    module.register_full_backward_pre_hook(lambda _, go: seen.append(("pre", plain(go))))
    module.register_full_backward_hook(lambda _, gi, go: seen.append((plain(gi), plain(go))))
    return module, seen


# By the name of what a hook returns: the value, and whether torch accepts it.
VALUES: dict[str, tuple[Any, bool]] = {
    "None": (None, True),
    "nothing": ((), False),
    "two": ((torch.ones(1),) * 2, False),
    "shape": ((torch.ones(4),), False),
    "text": (("text",), False),
    "int": (5, False),
    "dict": ({0: torch.ones(1)}, True),
    "list": ([torch.ones(1) * 2], True),
    "no gradient": ((None,), True),
}


@for_each("name", VALUES)
def test_what_a_pre_hook_may_return(name: str) -> None:
    """As many gradients as there are, or None; else the error and its text are torch's (rule 5)."""
    value, accepted = VALUES[name]

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, lambda a: a.view(-1))
        module.register_full_backward_pre_hook(returning(value))
        x = leaf()
        module(x * 1).sum().backward()
        return plain(x.grad), seen

    assert same(scenario)[0] == ("returned" if accepted else "raised")


@for_each("container", [tuple, list])
def test_values_of_hooks_chain(impl: Implementation, container: type) -> None:
    """Each hook sees what those before it left, global ones first (rule 5)."""
    module = impl.own.Linear(1, 1, bias=False)
    module.weight.data.fill_(2.0)
    seen: list[Any] = []
    module.register_full_backward_pre_hook(lambda _, go: container([go[0] + 1]))
    module.register_full_backward_pre_hook(returning(None))
    module.register_full_backward_hook(capturing(seen))
    module.register_full_backward_hook(lambda _, gi, go: container([gi[0] + 1]))
    impl.register_module_full_backward_hook(lambda _, gi, go: container([gi[0] * 10]))
    impl.register_module_full_backward_pre_hook(lambda _, go: container([go[0] * 3]))
    x = leaf(5.0)
    module(x.reshape(1, 1)).sum().backward()

    # The gradient of the output is (1 * 3) + 1.
    assert [gradient.item() for (gradient,) in seen[0]] == [80.0, 4.0]
    assert [type(gradients) for gradients in seen[0]] == [container, container]
    assert x.grad.item() == 81.0
    assert module.weight.grad.item() == 20.0


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)], ids=repr)
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
