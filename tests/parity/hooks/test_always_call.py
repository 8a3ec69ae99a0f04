import warnings

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.hooks.tools import capturing, forward_registrar, leaf, noting, raising, returning


class Unreadable(tuple):
    """Args that cannot be looked through, so that wrapping them fails."""

    __slots__ = ()

    def __iter__(self):
        raise LookupError("wrapping")


def fails_in_pre_hook(module: torch.nn.Module) -> None:
    """Make calls of the module raise in a pre-hook."""
    module.register_forward_pre_hook(raising(LookupError("pre-hook")))


def fails_in_wrapping(module: torch.nn.Module) -> None:
    """Make calls of the module raise while the args are wrapped for backward hooks."""
    module.register_forward_pre_hook(returning(Unreadable([leaf()])))
    module.register_full_backward_hook(returning(None))


def fails_in_forward(module: torch.nn.Module) -> None:
    """Make calls of the module raise in forward."""
    module.forward = raising(LookupError("forward"))


def fails_in_forward_hook(module: torch.nn.Module) -> None:
    """Make calls of the module raise in a forward hook."""
    module.register_forward_hook(raising(LookupError("forward hook")))


@for_each("scope", ["module", "global"])
@for_each(
    "break_call", [fails_in_pre_hook, fails_in_wrapping, fails_in_forward, fails_in_forward_hook]
)
def test_always_call_hook_runs_wherever_the_call_fails(
    impl: Implementation, break_call, scope: str
) -> None:
    """An exception in pre-hooks, wrapping, forward or forward hooks runs the hook (rule 18)."""
    log: list[str] = []
    module = impl.own.Identity()
    break_call(module)
    register = forward_registrar(impl, module, scope)
    register(noting(log, "always"), always_call=True)
    with pytest.raises(LookupError):
        module(0)

    assert log == ["always"]


@pytest.mark.parametrize("break_call", [fails_in_pre_hook, fails_in_forward])
def test_plain_forward_hooks_do_not_run_when_the_call_fails(
    impl: Implementation, break_call
) -> None:
    """Without always_call a forward hook runs after a successful forward only (rule 18)."""
    log: list[str] = []
    module = impl.own.Identity()
    break_call(module)
    module.register_forward_hook(noting(log, "plain"))
    impl.register_module_forward_hook(noting(log, "global plain"))
    with pytest.raises(LookupError):
        module(0)

    assert log == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_always_call_hook_does_not_run_for_exit_exceptions(
    impl: Implementation, error: type[BaseException]
) -> None:
    """A BaseException such as KeyboardInterrupt propagates without running the hooks (rule 18)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.forward = raising(error())
    module.register_forward_hook(noting(log, "always"), always_call=True)
    impl.register_module_forward_hook(noting(log, "global always"), always_call=True)
    with pytest.raises(error):
        module(0)

    assert log == []


def test_always_call_hooks_run_global_first_in_table_order(impl: Implementation) -> None:
    """After an error the global always_call hooks come first, then the module's (rule 18)."""
    log: list[str] = []
    module = impl.own.Identity()
    fails_in_forward(module)
    module.register_forward_hook(noting(log, "module 2"), always_call=True)
    module.register_forward_hook(noting(log, "module 1"), always_call=True, prepend=True)
    impl.register_module_forward_hook(noting(log, "global 1"), always_call=True)
    impl.register_module_forward_hook(noting(log, "global 2"), always_call=True)
    with pytest.raises(LookupError):
        module(0)

    assert log == ["global 1", "global 2", "module 1", "module 2"]


def test_always_call_hook_with_kwargs_gets_them_after_an_error(impl: Implementation) -> None:
    """A module's with_kwargs hook is called with (module, args, kwargs, output) (rule 18)."""
    calls: list[object] = []
    module = impl.own.Identity()
    fails_in_forward(module)
    module.register_forward_hook(
        lambda *received: calls.append(received), always_call=True, with_kwargs=True
    )
    with pytest.raises(LookupError):
        module(1, k=2)

    assert calls == [(module, (1,), {"k": 2}, None)]


@pytest.mark.parametrize("scope", ["module", "global"])
def test_always_call_hook_without_kwargs_gets_args_and_output(
    impl: Implementation, scope: str
) -> None:
    """A plain always_call hook is called with (module, args, output) after an error (rule 18)."""
    calls: list[object] = []
    module = impl.own.Identity()
    fails_in_forward(module)
    register = forward_registrar(impl, module, scope)
    register(lambda *received: calls.append(received), always_call=True)
    with pytest.raises(LookupError):
        module(1, k=2)

    assert calls == [(module, (1,), None)]


def test_always_call_hook_sees_the_args_as_the_pre_hooks_left_them(impl: Implementation) -> None:
    """The current args and kwargs are given, also those of a half-finished chain (rule 19)."""
    seen: list[object] = []
    module = impl.own.Identity()
    module.register_forward_pre_hook(returning(((7,), {"z": 1})), with_kwargs=True)
    module.register_forward_pre_hook(raising(LookupError("second pre-hook")))
    module.register_forward_pre_hook(returning((9,)))
    module.register_forward_hook(capturing(seen), always_call=True, with_kwargs=True)
    with pytest.raises(LookupError):
        module(1)

    assert seen == [((7,), {"z": 1}, None)]


def test_always_call_hook_sees_the_output_if_forward_finished(impl: Implementation) -> None:
    """After a failing forward hook the output stands as the hooks before it left it (rule 19)."""
    seen: list[object] = []
    module = impl.own.Identity()
    module.register_forward_hook(lambda _, args, out: out + 1)
    module.register_forward_hook(raising(LookupError("forward hook")))
    module.register_forward_hook(capturing(seen), always_call=True)
    with pytest.raises(LookupError):
        module(1)

    assert seen == [((1,), 2)]


def test_values_of_always_call_hooks_chain_after_an_error(impl: Implementation) -> None:
    """A returned value is the output for the next always_call hook, never the call's (rule 19)."""
    seen: list[object] = []
    module = impl.own.Identity()
    fails_in_forward(module)
    impl.register_module_forward_hook(returning("global"), always_call=True)
    module.register_forward_hook(capturing(seen), always_call=True)
    module.register_forward_hook(returning("module"), always_call=True)
    module.register_forward_hook(returning(None), always_call=True)
    module.register_forward_hook(capturing(seen), always_call=True)
    with pytest.raises(LookupError, match="forward"):
        module(1)

    assert seen == [((1,), "global"), ((1,), "module")]


def test_original_exception_is_raised_again(impl: Implementation) -> None:
    """The caller gets the very exception object that forward raised (rule 20)."""
    error = LookupError("forward")
    module = impl.own.Identity()
    module.forward = raising(error)
    module.register_forward_hook(returning("value"), always_call=True)
    with pytest.raises(LookupError) as caught:
        module(0)

    assert caught.value is error
    assert caught.value.__context__ is None


@pytest.mark.parametrize("scope", ["module", "global"])
def test_error_in_an_always_call_hook_is_silenced_with_a_warning(scope: str) -> None:
    """Its error becomes a warning, the next hook runs, the first error is raised (rule 20)."""

    def scenario(impl: Implementation) -> object:
        log: list[str] = []
        module = impl.own.Identity()
        fails_in_forward(module)
        register = forward_registrar(impl, module, scope)
        with (
            register(raising(ValueError("one")), always_call=True),
            register(raising(ValueError("two")), always_call=True),
            register(noting(log, "next"), always_call=True),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            with pytest.raises(LookupError, match="forward"):
                module(0)
        return log, [(w.category.__name__, str(w.message)) for w in caught]

    start = "global module" if scope == "global" else "module"
    text = (
        f"{start} forward hook with ``always_call=True`` raised an exception that was silenced "
        "as another error was raised in forward: "
    )
    expected = ["next"], [("UserWarning", f"{text}one"), ("UserWarning", f"{text}two")]

    assert same(scenario) == same(lambda impl: expected)


def test_always_call_hook_that_failed_on_the_normal_path_is_not_called_again(
    impl: Implementation,
) -> None:
    """The hook that raised is done; the always_call hooks after it still run (rule 21)."""
    log: list[str] = []

    def fails(*_: object) -> None:
        log.append("fails")
        raise LookupError("always_call hook")

    module = impl.own.Identity()
    module.register_forward_hook(noting(log, "before"), always_call=True)
    module.register_forward_hook(fails, always_call=True)
    module.register_forward_hook(noting(log, "plain"))
    module.register_forward_hook(noting(log, "after"), always_call=True)
    with pytest.raises(LookupError, match="always_call hook"):
        module(0)

    assert log == ["before", "fails", "after"]


def test_always_call_hooks_that_ran_are_not_repeated(impl: Implementation) -> None:
    """Those that ran before a later hook failed are not called a second time (rule 21)."""
    log: list[str] = []
    module = impl.own.Identity()
    impl.register_module_forward_hook(noting(log, "global"), always_call=True)
    module.register_forward_hook(noting(log, "first"), always_call=True)
    module.register_forward_hook(raising(LookupError("forward hook")))
    with pytest.raises(LookupError):
        module(0)

    assert log == ["global", "first"]


def test_always_call_hooks_do_not_run_while_compiling(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the compiler a failing call raises without its always_call hooks (rule 22)."""
    log: list[str] = []
    module = impl.own.Identity()
    fails_in_forward(module)
    module.register_forward_hook(noting(log, "always"), always_call=True)
    impl.register_module_forward_hook(noting(log, "global always"), always_call=True)
    with monkeypatch.context() as patched, pytest.raises(LookupError, match="forward"):
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        module(0)

    assert log == []


def test_hooks_run_as_usual_while_compiling_a_call_that_succeeds(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the compiler the normal path is the same (rule 22)."""
    module = impl.own.Identity()
    module.register_forward_pre_hook(lambda _, args: args[0] + 1)
    module.register_forward_hook(lambda _, args, out: out * 10, always_call=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        result = module(1)

    assert result == 20


def test_inner_error_runs_the_always_call_hooks_of_all_callers(impl: Implementation) -> None:
    """An error in a child passes through its parents' calls: their hooks run too (rule 18)."""
    log: list[str] = []
    inner = impl.own.Identity()
    outer = impl.own.Sequential(inner)
    fails_in_forward(inner)
    outer.register_forward_hook(noting(log, "outer"), always_call=True)
    inner.register_forward_hook(noting(log, "inner"), always_call=True)
    with pytest.raises(LookupError, match="forward"):
        outer(0)

    assert log == ["inner", "outer"]
