import pytest
import torch

from tests.helpers import Implementation
from tests.parity.hooks.tools import (
    WRAPPED,
    do_nothing,
    function_module,
    leaf,
    node_name,
    noting,
    returning,
)


def test_pre_hook_alone_does_not_warn_without_input_gradients(impl: Implementation) -> None:
    """Only a full hook can fire too early: a pre-hook runs when it should, without a warning."""
    seen: list[object] = []
    module = impl.own.Linear(1, 1, bias=False)
    module.register_full_backward_pre_hook(lambda _, go: seen.append(go[0].item()) or (go[0] * 3,))
    module(torch.ones(1, 1)).sum().backward()

    assert seen == [1.0]
    assert module.weight.grad.item() == 3.0


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


class Items(tuple):
    """A tuple that is made as tuples are."""

    __slots__ = ()


class Checked(tuple):
    """A tuple with a constructor of its own that takes one iterable."""

    __slots__ = ()

    def __new__(cls, items):  # noqa: D102
        return super().__new__(cls, list(items))


class Pieces(tuple):
    """A tuple that takes its items one by one."""

    __slots__ = ()

    def __new__(cls, *items):  # noqa: D102
        return super().__new__(cls, items)


class Labelled(tuple):
    """A tuple of one tensor that it copies, with a label that must be none."""

    __slots__ = ()

    def __new__(cls, item, label=None):  # noqa: D102
        return super().__new__(cls, (item.clone(),))


@pytest.mark.parametrize("kind", [Items, Checked])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_output_of_a_tuple_class_is_rebuilt(impl: Implementation, kind: type, count: int) -> None:
    """The class of an output that is made from one iterable is kept, with wrapped tensors."""
    log: list[str] = []
    module = function_module(impl, lambda x: kind(x * n for n in range(1, count + 1)))
    module.register_full_backward_hook(noting(log, "ran"))
    result = module(leaf(1.0, 1.0))
    torch.stack(list(result)).sum().backward()

    assert type(result) is kind
    assert [item.tolist() for item in result] == [[n, n] for n in range(1, count + 1)]
    assert [node_name(item) for item in result] == [WRAPPED] * count
    assert log == ["ran"]


def test_output_of_torchs_own_tuple_class_is_rebuilt(impl: Implementation) -> None:
    """Named tuples, such as those of `torch.max`, keep their class and fields."""
    module = function_module(impl, lambda x: torch.max(x, dim=0))
    module.register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,))
    x = leaf(1.0, 5.0)
    result = module(x)
    result.values.backward()

    assert type(result) is torch.return_types.max
    assert (result.values.item(), result.indices.item()) == (5.0, 1)
    assert x.grad.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_output_of_a_class_that_takes_its_items_one_by_one_is_rebuilt(
    impl: Implementation, count: int
) -> None:
    """A constructor that takes the items as arguments gets them so."""
    module = function_module(impl, lambda x: Pieces(*(x * n for n in range(count))))
    module.register_full_backward_hook(do_nothing)
    result = module(leaf(1.0, 1.0))

    assert type(result) is Pieces
    assert [item.tolist() for item in result] == [[n, n] for n in range(count)]


def test_output_of_a_class_that_takes_its_only_item_apart_from_others_is_rebuilt(
    impl: Implementation,
) -> None:
    """A constructor that changes its one item, and fails for anything else, still works."""
    module = function_module(impl, Labelled)
    module.register_full_backward_hook(do_nothing)
    result = module(leaf(1.0, 1.0))

    assert type(result) is Labelled
    assert result[0].tolist() == [1.0, 1.0]
