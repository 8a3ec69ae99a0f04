import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.modules.module as torch_module

from tests.helpers import TORCH, Implementation
from tests.parity.hooks.tools import (
    clean_global_hooks,
    do_nothing,
    function_module,
    noting,
    returning,
)


@pytest.fixture(autouse=True)
def _clean_global_hooks() -> Iterator[None]:
    """Leave no global hook behind."""
    with clean_global_hooks():
        yield


@pytest.mark.parametrize("always_call", [False, True])
def test_removed_global_forward_hook_with_kwargs_leaves_nothing_behind(
    impl: Implementation, always_call: bool
) -> None:
    """Without its only hook, no table of global hooks has an entry: compiling does not warn."""
    handle = impl.register_module_forward_hook(
        do_nothing, with_kwargs=True, always_call=always_call
    )
    handle.remove()

    assert not torch_module._has_any_global_hook()


KINDS = pytest.mark.parametrize(
    ("first", "second"),
    list(
        itertools.permutations(
            ["register_module_full_backward_hook", "register_module_backward_hook"]
        )
    ),
)


@KINDS
def test_torch_sees_which_kind_has_taken_the_room_of_a_removed_global_backward_hook(
    impl: Implementation, first: str, second: str
) -> None:
    """The kind that may be registered next, through torch too, is that of the hooks there are."""
    getattr(impl, first)(do_nothing).remove()
    getattr(impl, second)(do_nothing)

    assert torch_module._global_is_full_backward_hook is (
        second == "register_module_full_backward_hook"
    )
    with pytest.raises(RuntimeError, match="as a global Module hook"):
        getattr(TORCH, first)(do_nothing)


@KINDS
def test_one_of_two_removed_global_backward_hooks_makes_no_room(
    impl: Implementation, first: str, second: str
) -> None:
    """As long as one global backward hook is left, the other kind is refused."""
    handle = getattr(TORCH, first)(do_nothing)
    getattr(impl, first)(do_nothing)
    handle.remove()

    with pytest.raises(RuntimeError, match="as a global Module hook"):
        getattr(impl, second)(do_nothing)


def test_global_forward_pre_hook_may_see_the_keyword_arguments(impl: Implementation) -> None:
    """With `with_kwargs` a global forward pre-hook is called with module, args and kwargs."""
    calls: list[object] = []
    module = function_module(impl, lambda *args, **kwargs: None)
    impl.register_module_forward_pre_hook(
        lambda *received: calls.append(received), with_kwargs=True
    )
    module(1, 2, k=3)

    assert calls == [(module, (1, 2), {"k": 3})]


def test_global_forward_pre_hook_may_replace_the_keyword_arguments(impl: Implementation) -> None:
    """What it returns goes to later hooks and to forward."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    impl.register_module_forward_pre_hook(returning(((4,), {"k": 5})), with_kwargs=True)
    impl.register_module_forward_pre_hook(lambda _, args: (*args, "later"))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ((*args, "own"), {**kwargs, "own": True}), with_kwargs=True
    )

    assert module(1, k=3) == ((4, "later", "own"), {"k": 5, "own": True})


@pytest.mark.parametrize("value", [5, (1,), (1, {}), ((1,), 2), [(1,), {}]], ids=repr)
def test_global_forward_pre_hook_with_kwargs_must_return_both(
    impl: Implementation, value: object
) -> None:
    """Another result is the error that a module's own pre-hook gives."""
    impl.register_module_forward_pre_hook(returning(value), with_kwargs=True)

    for module in (impl.nn.Identity(), torch.nn.Identity()):
        with pytest.raises(RuntimeError, match="forward pre-hook must return None or a tuple of"):
            module(torch.ones(1))


def test_global_forward_pre_hook_with_kwargs_runs_for_torchs_modules(impl: Implementation) -> None:
    """A plain torch module hands over, and takes back, its positional arguments."""
    seen: list[object] = []

    def hook(module, args, kwargs):
        seen.append((args, kwargs))
        return (args[0] * 2,), kwargs

    impl.register_module_forward_pre_hook(hook, with_kwargs=True)
    module = function_module(TORCH, lambda *args, **kwargs: (args, kwargs))

    assert module(3, k=4) == ((6,), {"k": 4})
    assert seen == [((3,), {})]


def test_global_forward_pre_hook_with_kwargs_may_keep_the_arguments_of_torchs_modules(
    impl: Implementation,
) -> None:
    """None from the hook leaves the arguments of a plain torch module alone."""
    impl.register_module_forward_pre_hook(do_nothing, with_kwargs=True)
    module = function_module(TORCH, lambda *args, **kwargs: (args, kwargs))

    assert module(3, k=4) == ((3,), {"k": 4})


def test_global_forward_pre_hook_cannot_give_keyword_arguments_to_torchs_modules(
    impl: Implementation,
) -> None:
    """An edit of keyword arguments that torch would drop is an error that says so."""
    impl.register_module_forward_pre_hook(returning(((1,), {"k": 2})), with_kwargs=True)

    with pytest.raises(RuntimeError, match="cannot give keyword arguments to Identity"):
        torch.nn.Identity()(3)


def test_removed_global_forward_pre_hook_with_kwargs_no_longer_runs(impl: Implementation) -> None:
    """Its handle takes it out of the table of torch's that it stands in."""
    log: list[str] = []
    handle = impl.register_module_forward_pre_hook(noting(log, "ran"), with_kwargs=True)
    impl.nn.Identity()(0)
    handle.remove()
    impl.nn.Identity()(0)

    assert log == ["ran"]
    assert not torch_module._has_any_global_hook()
