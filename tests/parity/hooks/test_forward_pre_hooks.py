import collections

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import capturing, noting, raising, returning


def test_pre_hooks_run_in_order_global_first_then_forward(impl: Implementation) -> None:
    """Global pre-hooks run first, then the module's, each in table order, then forward (rule 10)."""
    log: list[str] = []
    module = function_module(impl, lambda x: log.append("forward") or x)
    module.register_forward_pre_hook(noting(log, "module 1"))
    impl.register_module_forward_pre_hook(noting(log, "global 1"))
    module.register_forward_pre_hook(noting(log, "module 2"))
    impl.register_module_forward_pre_hook(noting(log, "global 2"))
    module(0)

    assert log == ["global 1", "global 2", "module 1", "module 2", "forward"]


def test_plain_pre_hook_gets_the_module_and_the_args(impl: Implementation) -> None:
    """Without with_kwargs a pre-hook is called with (module, args) and no kwargs (rule 10)."""
    calls: list[object] = []
    module = function_module(impl, lambda x, *, k: x)
    module.register_forward_pre_hook(lambda *received: calls.append(received))
    module(1, k=2)

    assert calls == [(module, (1,))]


def test_pre_hook_with_kwargs_gets_both(impl: Implementation) -> None:
    """With with_kwargs a pre-hook is called with (module, args, kwargs) (rule 10)."""
    calls: list[object] = []
    module = function_module(impl, lambda x, *, k: x)
    module.register_forward_pre_hook(lambda *received: calls.append(received), with_kwargs=True)
    module(1, k=2)

    assert calls == [(module, (1,), {"k": 2})]


def test_global_pre_hook_gets_the_module_and_the_args(impl: Implementation) -> None:
    """A global pre-hook is called with (module, args) (rule 10)."""
    calls: list[object] = []
    module = function_module(impl, lambda x, *, k: x)
    impl.register_module_forward_pre_hook(lambda *received: calls.append(received))
    module(1, k=2)

    assert calls == [(module, (1,))]


def test_pre_hook_added_by_a_pre_hook_waits_for_the_next_call(impl: Implementation) -> None:
    """The list of pre-hooks is taken before the first one runs (rule 10)."""
    log: list[str] = []
    module = impl.own.Identity()

    def adds(module: torch.nn.Module, args: tuple[object, ...]) -> None:
        log.append("adds")
        module.register_forward_pre_hook(noting(log, "added"))

    handle = module.register_forward_pre_hook(adds)
    module(0)
    handle.remove()

    assert log == ["adds"]

    module(0)

    assert log == ["adds", "added"]


def test_pre_hook_removed_by_an_earlier_one_still_runs_in_that_call(impl: Implementation) -> None:
    """A pre-hook that is removed while the call runs is called once more (rule 10)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_pre_hook(lambda *_: later.remove())
    later = module.register_forward_pre_hook(noting(log, "later"))
    module(0)
    module(0)

    assert log == ["later"]


def test_pre_hook_may_remove_itself(impl: Implementation) -> None:
    """A pre-hook that removes its own handle runs in one call only (rule 10)."""
    log: list[str] = []
    module = impl.own.Identity()
    handle = module.register_forward_pre_hook(lambda *_: (log.append("ran"), handle.remove())[1])
    module(0)
    module(0)

    assert log == ["ran"]


def test_pre_hook_that_returns_none_leaves_the_args(impl: Implementation) -> None:
    """None from a pre-hook changes nothing (rule 11)."""
    received: list[object] = []
    module = function_module(impl, lambda *args, **kwargs: received.append((args, kwargs)))
    module.register_forward_pre_hook(returning(None))
    module.register_forward_pre_hook(returning(None), with_kwargs=True)
    module(1, 2, k=3)

    assert received == [((1, 2), {"k": 3})]


def test_pre_hook_that_returns_a_tuple_replaces_the_args(impl: Implementation) -> None:
    """A tuple from a pre-hook is the new args, whatever its length; kwargs stay (rule 11)."""
    received: list[object] = []
    module = function_module(impl, lambda *args, **kwargs: received.append((args, kwargs)))
    handle = module.register_forward_pre_hook(returning((7, 8, 9)))
    module(1, k=3)
    handle.remove()
    module.register_forward_pre_hook(returning(()))
    module(1, k=3)

    assert received == [((7, 8, 9), {"k": 3}), ((), {"k": 3})]


@for_each("value", [0, False, "", 5, [7, 8], {"a": 1}], ids=repr)
def test_pre_hook_that_returns_a_bare_value_has_it_wrapped(
    impl: Implementation, value: object
) -> None:
    """Anything else than None or a tuple, a list and a falsy value too, is one arg (rule 11)."""
    received: list[object] = []
    module = function_module(impl, lambda *args: received.append(args))
    module.register_forward_pre_hook(returning(value))
    module(1, 2)

    assert received == [(value,)]


def test_global_pre_hook_may_replace_the_args(impl: Implementation) -> None:
    """A global pre-hook's value replaces the args that the module's own hooks see (rule 11)."""
    seen: list[object] = []
    module = function_module(impl, lambda *args: args)
    impl.register_module_forward_pre_hook(returning(5))
    module.register_forward_pre_hook(capturing(seen))

    assert module(1, 2) == (5,)
    assert seen == [((5,),)]


def test_pre_hooks_chain(impl: Implementation) -> None:
    """Each pre-hook sees the args as the ones before it left them (rule 11)."""
    module = function_module(impl, lambda *args: args)
    module.register_forward_pre_hook(lambda _, args: (*args, "a"))
    module.register_forward_pre_hook(lambda _, args: (*args, "b"))

    assert module("x") == ("x", "a", "b")


def test_pre_hook_with_kwargs_replaces_args_and_kwargs(impl: Implementation) -> None:
    """A tuple of two from a with_kwargs pre-hook is the new args and the new kwargs (rule 11)."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    module.register_forward_pre_hook(returning(((7, 8), {"z": 1})), with_kwargs=True)

    assert module(1, k=2) == ((7, 8), {"z": 1})


@for_each(
    "value",
    [5, 0, (1,), (1, 2, 3), [(1,), {}], {"args": (), "kwargs": {}}, ()],
    ids=repr,
)
def test_pre_hook_with_kwargs_that_returns_another_form_is_an_error(value: object) -> None:
    """A with_kwargs pre-hook that returns no tuple of two raises, with its value named (rule 11)."""

    def scenario(impl: Implementation) -> object:
        module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
        module.register_forward_pre_hook(returning(value), with_kwargs=True)
        return module(1, k=2)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert text.endswith(f"but got {value}.")


def test_pre_hooks_with_and_without_kwargs_chain(impl: Implementation) -> None:
    """Plain and with_kwargs pre-hooks share one table and one state of args (rule 11)."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    module.register_forward_pre_hook(lambda _, args: (*args, "plain"))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ((*args, "both"), {**kwargs, "k": len(args)}), with_kwargs=True
    )
    module.register_forward_pre_hook(lambda _, args: (*args, "last"))

    assert module("x", k=0) == (("x", "plain", "both", "last"), {"k": 2})


def test_error_in_a_pre_hook_stops_the_call(impl: Implementation) -> None:
    """An exception from a pre-hook passes to the caller; nothing after it runs (rule 10)."""
    log: list[str] = []
    module = function_module(impl, lambda x: log.append("forward"))
    module.register_forward_pre_hook(raising(KeyError("pre")))
    module.register_forward_pre_hook(noting(log, "later"))
    module.register_forward_hook(noting(log, "after"))
    with pytest.raises(KeyError, match="pre"):
        module(0)

    assert log == []


@for_each("args", [(7, 8), [7, 8], ()], ids=repr)
@for_each("mapping", [dict, collections.OrderedDict, collections.UserDict])
def test_pre_hook_with_kwargs_may_return_any_sequence_and_mapping(
    impl: Implementation, args: object, mapping: type
) -> None:
    """A list of arguments and every kind of mapping are still taken."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    module.register_forward_pre_hook(returning((args, mapping(z=1))), with_kwargs=True)

    assert module(1, k=2) == (tuple(args), {"z": 1})
