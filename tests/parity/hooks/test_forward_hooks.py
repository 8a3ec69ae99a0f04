import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import function_module
from tests.parity.hooks.tools import (
    WRAPPED,
    capturing,
    forward_registrar,
    leaf,
    node_name,
    noting,
    raising,
    returning,
)


def test_forward_is_called_with_the_modified_args_and_kwargs(impl: Implementation) -> None:
    """Forward gets what the pre-hooks made, and its value is the call's (rule 13)."""
    module = function_module(impl, lambda *args, **kwargs: (args, kwargs))
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"k": kwargs["k"] * 10}), with_kwargs=True
    )

    assert module(1, k=2) == ((2,), {"k": 20})


def test_calling_forward_itself_runs_no_hooks(impl: Implementation) -> None:
    """Hooks belong to the call: `module.forward(...)` runs none (rule 13)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_pre_hook(noting(log, "pre"))
    module.register_forward_hook(noting(log, "after"))
    impl.register_module_forward_hook(noting(log, "global"))
    module.forward(0)

    assert log == []


def test_forward_hooks_run_in_order_global_first(impl: Implementation) -> None:
    """Global forward hooks run first, then the module's, each in table order (rule 14)."""
    log: list[str] = []
    module = function_module(impl, lambda x: log.append("forward") or x)
    module.register_forward_hook(noting(log, "module 1"))
    impl.register_module_forward_hook(noting(log, "global 1"))
    module.register_forward_hook(noting(log, "module 2"))
    impl.register_module_forward_hook(noting(log, "global 2"))
    module(0)

    assert log == ["forward", "global 1", "global 2", "module 1", "module 2"]


@pytest.mark.parametrize("scope", ["module", "global"])
def test_forward_hook_signatures(impl: Implementation, scope: str) -> None:
    """Hooks get (module, args, output); with_kwargs ones (module, args, kwargs, output) (rule 14)."""
    calls: list[object] = []
    module = function_module(impl, lambda x, *, k: "out")
    register = forward_registrar(impl, module, scope)
    register(lambda *received: calls.append(received))
    register(lambda *received: calls.append(received), with_kwargs=True)
    module(1, k=2)

    assert calls == [(module, (1,), "out"), (module, (1,), {"k": 2}, "out")]


def test_forward_hooks_see_the_args_and_kwargs_that_forward_got(impl: Implementation) -> None:
    """Forward hooks are given the args and kwargs as the pre-hooks left them (rule 14)."""
    seen: list[object] = []
    module = function_module(impl, lambda *args, **kwargs: "out")
    module.register_forward_pre_hook(returning(((7,), {"z": 1})), with_kwargs=True)
    module.register_forward_hook(capturing(seen))
    module.register_forward_hook(capturing(seen), with_kwargs=True)
    module(1, k=2)

    assert seen == [((7,), "out"), ((7,), {"z": 1}, "out")]


def test_forward_hooks_see_the_wrapped_inputs(impl: Implementation) -> None:
    """With a full backward hook the args that forward hooks see are the wrapped views (rule 14)."""
    nodes: list[str | None] = []
    module = function_module(impl, lambda x: x * 2)
    module.register_full_backward_hook(returning(None))
    module.register_forward_hook(lambda _, args, out: nodes.append(node_name(args[0])))
    module(leaf())

    assert nodes == [WRAPPED]


def test_value_of_a_forward_hook_replaces_the_output_for_later_hooks(impl: Implementation) -> None:
    """A returned value is the output for the next hook and, in the end, the caller (rule 14)."""
    module = impl.own.Identity()
    impl.register_module_forward_hook(lambda _, args, out: [*out, "global"])
    module.register_forward_hook(lambda _, args, out: [*out, "first"])
    module.register_forward_hook(lambda _, args, kwargs, out: [*out, "kwargs"], with_kwargs=True)

    assert module(["x"]) == ["x", "global", "first", "kwargs"]


@for_each("value", [False, 0, "", (), []], ids=repr)
def test_falsy_value_of_a_forward_hook_counts(impl: Implementation, value: object) -> None:
    """Only None leaves the output alone: any other falsy value replaces it (rule 14)."""
    module = impl.own.Identity()
    module.register_forward_hook(returning(value))
    result = module(1)

    assert (type(result), result) == (type(value), value)


def test_forward_hook_cannot_replace_the_output_by_none(impl: Implementation) -> None:
    """None from a forward hook keeps the output (rule 14)."""
    module = impl.own.Identity()
    module.register_forward_hook(returning(None))

    assert module(1) == 1


def test_value_of_a_forward_hook_is_not_wrapped_in_a_tuple(impl: Implementation) -> None:
    """Unlike a pre-hook's, a forward hook's value is passed on as it is (rule 14)."""
    module = impl.own.Identity()
    module.register_forward_hook(returning((1,)))

    assert module(0) == (1,)


def test_forward_hook_added_by_a_forward_hook_waits_for_the_next_call(impl: Implementation) -> None:
    """The list of forward hooks is taken before the first one runs (rule 14)."""
    log: list[str] = []
    module = impl.own.Identity()

    def adds(module: torch.nn.Module, *_: object) -> None:
        log.append("adds")
        module.register_forward_hook(noting(log, "added"))

    handle = module.register_forward_hook(adds)
    module(0)
    handle.remove()

    assert log == ["adds"]

    module(0)

    assert log == ["adds", "added"]


def test_forward_hook_removed_by_an_earlier_one_still_runs_in_that_call(
    impl: Implementation,
) -> None:
    """A forward hook that is removed while the call runs is called once more (rule 14)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_hook(lambda *_: later.remove())
    later = module.register_forward_hook(noting(log, "later"))
    module(0)
    module(0)

    assert log == ["later"]


def test_forward_hook_may_remove_itself(impl: Implementation) -> None:
    """A forward hook that removes its own handle runs in one call only (rule 14)."""
    log: list[str] = []
    module = impl.own.Identity()
    handle = module.register_forward_hook(lambda *_: (log.append("ran"), handle.remove())[1])
    module(0)
    module(0)

    assert log == ["ran"]


def test_error_in_a_forward_hook_reaches_the_caller(impl: Implementation) -> None:
    """An exception from a forward hook ends the call; plain hooks after it do not run (rule 14)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_hook(noting(log, "before"))
    module.register_forward_hook(raising(KeyError("hook")))
    module.register_forward_hook(noting(log, "after"))
    with pytest.raises(KeyError, match="hook"):
        module(0)

    assert log == ["before"]


def test_always_call_hook_runs_once_in_a_call_that_succeeds(impl: Implementation) -> None:
    """On the normal path an always_call hook is an ordinary hook in its place (rule 15)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_hook(noting(log, "a"))
    module.register_forward_hook(noting(log, "always"), always_call=True)
    module.register_forward_hook(noting(log, "b"))
    impl.register_module_forward_hook(noting(log, "global always"), always_call=True)
    module(0)

    assert log == ["global always", "a", "always", "b"]


@pytest.mark.parametrize("scope", ["module", "global"])
def test_always_call_hook_is_marked_as_run_before_it_is_called(
    impl: Implementation, scope: str
) -> None:
    """An always_call hook that raises on the normal path is not called a second time (rule 15)."""
    log: list[str] = []

    def fails(*_: object) -> None:
        log.append("called")
        raise ValueError("from the hook")

    module = impl.own.Identity()
    register = forward_registrar(impl, module, scope)
    register(fails, always_call=True)
    with pytest.raises(ValueError, match="from the hook"):
        module(0)

    assert log == ["called"]


def test_hooks_run_for_every_module_of_a_network(impl: Implementation) -> None:
    """Hooks of a child run inside its parent's call (rule 14)."""
    log: list[str] = []
    inner, outer = impl.own.Identity(), impl.own.Sequential()
    outer.append(inner)
    for name, module in {"inner": inner, "outer": outer}.items():
        module.register_forward_pre_hook(noting(log, f"{name} pre"))
        module.register_forward_hook(noting(log, f"{name} after"))
    outer(0)

    assert log == ["outer pre", "inner pre", "inner after", "outer after"]
