import collections
import re

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.parity.hooks.tools import function_module, leaf, returning


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(2), torch.ones(2)),
        (torch.ones(2), {}),
        ((torch.ones(2),), torch.ones(2)),
        ("ab", {}),
        ({"a": 1}, {}),
        ((1,), None),
        (None, {}),
    ],
    ids=["tensors", "args tensor", "kwargs tensor", "args text", "dicts", "no kwargs", "no args"],
)
def test_pre_hook_with_kwargs_that_returns_two_of_something_else_is_an_error(
    impl: Implementation, value: object
) -> None:
    """A pair that is not args and kwargs is refused by name, and its tensors are not taken apart."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    module.register_forward_pre_hook(returning(value), with_kwargs=True)
    message = (
        f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {value}."
    )

    with pytest.raises(RuntimeError, match=re.escape(message)):
        module(1, k=2)


@for_each("args", [(7, 8), [7, 8], ()], ids=repr)
@for_each("mapping", [dict, collections.OrderedDict, collections.UserDict])
def test_pre_hook_with_kwargs_may_return_any_sequence_and_mapping(
    impl: Implementation, args: object, mapping: type
) -> None:
    """A list of arguments and every kind of mapping are still taken."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    module.register_forward_pre_hook(returning((args, mapping(z=1))), with_kwargs=True)

    assert module(1, k=2) == (tuple(args), {"z": 1})


def test_pre_hook_with_kwargs_may_return_a_list_to_a_module_with_backward_hooks(
    impl: Implementation,
) -> None:
    """The tensors of a list of arguments pass through a full backward hook as those of a tuple."""
    seen: list[object] = []
    x, y = leaf(1.0), leaf(2.0)
    module = function_module(impl, lambda a, b: a * b)
    module.register_forward_pre_hook(lambda _, args, kwargs: ([*args, y], kwargs), with_kwargs=True)
    module.register_full_backward_hook(lambda _, gi, go: seen.append([g.item() for g in gi]))
    module(x).backward()

    assert seen == [[2.0, 1.0]]
