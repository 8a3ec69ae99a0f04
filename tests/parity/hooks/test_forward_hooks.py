import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import (
    MODULE_REGISTRARS,
    WRAPPED,
    inner_tensor,
    leaf,
    node_name,
    noting,
    raising,
    recording,
    returning,
)


KWARGS = {"with_kwargs": True}


def echo(impl: Implementation) -> Any:
    """Make a module that returns its arguments."""
    return function_module(impl, lambda *args, **kwargs: (args, kwargs))


def test_a_compiled_call_replaces_the_whole_call(impl: Implementation) -> None:
    """`_compiled_call_impl` is the call, without hooks, until it is None again (rule 6)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_pre_hook(noting(log, "pre"))
    module.register_forward_hook(noting(log, "after"))
    module._compiled_call_impl = lambda *args, **kwargs: ("compiled", args, kwargs)

    assert module(1, k=2) == ("compiled", (1,), {"k": 2})
    assert impl.own.Sequential(module)(0) == ("compiled", (0,), {})
    assert log == []

    module._compiled_call_impl = None

    assert module(1) == 1
    assert log == ["pre", "after"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@for_each("through", ["module", "function"])
@for_each("hooked", [False, True])
def test_a_call_goes_through_slow_forward_while_tracing(
    impl: Implementation, hooked: bool, through: str
) -> None:
    """Only while a trace is recorded does a call reach forward that way (rule 7)."""
    log: list[str] = []

    class Recorded(impl.Module):
        def _slow_forward(self, *args, **kwargs):
            log.append("slow")
            return super()._slow_forward(*args, **kwargs)

        def forward(self, x):
            log.append("forward")
            return x * 2

    module = Recorded()
    if hooked:
        module.register_forward_hook(returning(None))
    module(torch.ones(1))

    def function(x: torch.Tensor) -> torch.Tensor:
        return module(x)

    target = module if through == "module" else function
    torch.jit.trace(target, torch.ones(1), check_trace=False)

    assert log == ["forward", "slow", "forward"]


@for_each("hooked", [False, True])
def test_methods_of_the_instance_win(impl: Implementation, hooked: bool) -> None:
    """A `forward` or `_call_impl` that is assigned to the instance is the one called (rule 7)."""
    module = impl.own.Identity()
    if hooked:
        module.register_forward_hook(lambda _, args, out: out + 1)
    module.forward = lambda x: x + 10

    assert module(1) == 11 + hooked

    original = module._call_impl
    module._call_impl = lambda x: ("wrapped", original(x))

    assert module(1) == ("wrapped", 11 + hooked)

    del module.forward, module._call_impl

    assert module(1) == 1 + hooked


def test_a_call_without_hooks_passes_everything_through(impl: Implementation) -> None:
    """Arguments and value are the very objects, tensors included (rule 8)."""
    x, value = leaf(), object()
    received: list[object] = []
    module = function_module(impl, lambda *args, **kw: received.append((args, kw)) or value)

    assert module(1, 2, k=3) is value
    assert received == [((1, 2), {"k": 3})]
    assert impl.own.Identity()(x) is x


@for_each(
    "registrar", [name for name in MODULE_REGISTRARS if "_forward_" in name or "backward" in name]
)
def test_whether_there_are_hooks_is_decided_on_entry(impl: Implementation, registrar: str) -> None:
    """A hook that forward adds to a module without any waits for the next call (rule 8)."""
    log: list[str] = []

    class AddsOne(impl.Module):
        def forward(self, x):
            if not log:
                log.append("forward")
                getattr(self, registrar)(noting(log, registrar))
            return x.view(-1)

    module = AddsOne()
    module(inner_tensor()).sum().backward()

    assert log == ["forward"]

    module(inner_tensor()).sum().backward()

    assert log == ["forward", registrar]


def test_a_call_runs_everything_in_order(impl: Implementation) -> None:
    """Every kind of hook, global and module, around one forward and backward (rules 9 to 16, 23)."""
    log: list[str | None] = []
    module = function_module(impl, lambda x: log.append(f"forward {node_name(x)}") or x * 2)
    impl.register_module_forward_pre_hook(noting(log, "global pre"))
    impl.register_module_forward_hook(
        lambda _, args, out: log.append(f"global after {node_name(out)}")
    )
    impl.register_module_full_backward_pre_hook(noting(log, "global backward pre"))
    impl.register_module_full_backward_hook(noting(log, "global backward"))
    for registrar, name in {
        "register_forward_pre_hook": "pre",
        "register_forward_hook": "after",
        "register_full_backward_pre_hook": "backward pre",
        "register_full_backward_hook": "backward",
    }.items():
        getattr(module, registrar)(noting(log, f"{name} 2"))
        getattr(module, registrar)(noting(log, f"{name} 1"), prepend=True)
    result = module(leaf())
    log.append(f"result {node_name(result)}")
    result.sum().backward()
    module.forward(leaf())

    assert log == [
        *("global pre", "pre 1", "pre 2", f"forward {WRAPPED}"),
        *("global after MulBackward0", "after 1", "after 2", f"result {WRAPPED}"),
        *("global backward pre", "backward pre 1", "backward pre 2"),
        *("global backward", "backward 1", "backward 2"),
        "forward None",
    ]


def test_hooks_run_for_every_module_of_a_network(impl: Implementation) -> None:
    """Hooks of a child, and global ones, run inside its parent's call (rules 10 and 14)."""
    log: list[str] = []
    network = impl.own.Sequential(impl.own.Linear(1, 1), impl.own.ReLU())
    network[0].register_forward_pre_hook(noting(log, "own"))
    impl.register_module_forward_pre_hook(lambda module, _: log.append(type(module).__name__))
    handle = impl.register_module_forward_hook(
        lambda module, *_: log.append(f"{type(module).__name__} done")
    )
    network(torch.ones(1, 1))

    assert log == [
        *("Sequential", "Linear", "own", "Linear done", "ReLU", "ReLU done", "Sequential done"),
    ]

    handle.remove()
    log.clear()
    network(torch.ones(1, 1))

    assert log == ["Sequential", "Linear", "own", "ReLU"]


def test_what_forward_hooks_are_given(impl: Implementation) -> None:
    """The arguments as the pre-hooks left them, kwargs on request (rules 10, 13 and 14)."""
    calls: list[tuple[Any, ...]] = []
    module = echo(impl)
    module.register_forward_pre_hook(recording(calls))
    module.register_forward_pre_hook(recording(calls), **KWARGS)
    impl.register_module_forward_pre_hook(recording(calls))
    module.register_forward_pre_hook(returning(((7,), {"z": 1})), **KWARGS)
    for register in (impl.register_module_forward_hook, module.register_forward_hook):
        register(recording(calls))
        register(recording(calls), **KWARGS)
    out = module(1, k=2)

    assert out == ((7,), {"z": 1})
    assert [call[0] is module for call in calls] == [True] * 7
    assert [call[1:] for call in calls] == [
        *(((1,),), ((1,),), ((1,), {"k": 2})),
        *(((7,), out), ((7,), {"z": 1}, out)) * 2,
    ]


@for_each("kind", ["forward_pre_hook", "forward_hook"])
def test_hooks_are_listed_before_the_first_one_runs(impl: Implementation, kind: str) -> None:
    """One that is added waits, and one that is removed still runs (rules 10 and 14)."""
    log: list[str] = []
    module = impl.own.Identity()
    register = getattr(module, f"register_{kind}")

    def changes(*_: object) -> None:
        log.append("changes")
        first.remove()
        later.remove()
        register(noting(log, "added"))

    first = register(changes)
    later = register(noting(log, "later"))
    module(0)

    assert log == ["changes", "later"]

    module(0)

    assert log == ["changes", "later", "added"]


def test_forward_hooks_are_listed_after_forward(impl: Implementation) -> None:
    """In a call that has hooks, a forward hook that forward adds runs at once (rule 14)."""
    log: list[str] = []

    class AddsOne(impl.Module):
        def forward(self, x):
            self.register_forward_hook(noting(log, "added"))
            return x

    module = AddsOne()
    module.register_forward_pre_hook(noting(log, "pre"))
    module(0)

    assert log == ["pre", "added"]


# By the kind of value: hooks, and the arguments that forward then gets in `module(1, k=2)`.
PRE_HOOKS: dict[str, tuple[list[tuple[Any, dict[str, bool]]], Any]] = {
    "None": ([(None, {}), (None, KWARGS)], ((1,), {"k": 2})),
    "a tuple": ([((7, 8, 9), {})], ((7, 8, 9), {"k": 2})),
    "no arguments": ([((), {})], ((), {"k": 2})),
    "a falsy value": ([(0, {})], ((0,), {"k": 2})),
    "a list": ([([7, 8], {})], (([7, 8],), {"k": 2})),
    "a dict": ([({"a": 1}, {})], (({"a": 1},), {"k": 2})),
    "both": ([(((7, 8), {"z": 1}), KWARGS)], ((7, 8), {"z": 1})),
    "both in a list and a mapping": (
        [(([7], collections.UserDict(z=1)), KWARGS)],
        ((7,), {"z": 1}),
    ),
}


@for_each("case", PRE_HOOKS)
def test_what_a_pre_hook_may_return(impl: Implementation, case: str) -> None:
    """None, the args, or with kwargs both; anything else is the only argument (rule 11)."""
    hooks, expected = PRE_HOOKS[case]
    module = echo(impl)
    for value, options in hooks:
        module.register_forward_pre_hook(returning(value), **options)

    assert module(1, k=2) == expected


@for_each(
    "value",
    [5, 0, (1,), (1, 2, 3), [(1,), {}], {"args": (), "kwargs": {}}, ()],
    ids=repr,
)
def test_pre_hook_with_kwargs_that_returns_another_form_is_an_error(value: object) -> None:
    """A with_kwargs pre-hook that returns no tuple of two raises, with its value named (rule 11)."""

    def scenario(impl: Implementation) -> object:
        module = echo(impl)
        module.register_forward_pre_hook(returning(value), **KWARGS)
        return module(1, k=2)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert text.endswith(f"but got {value}.")


def test_values_of_hooks_chain(impl: Implementation) -> None:
    """Each hook sees what those before it left, global ones first (rules 11 and 14)."""
    module = echo(impl)
    module.register_forward_pre_hook(lambda _, args: (*args, "plain"))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ((*args, "both"), {"k": len(args)}), **KWARGS
    )
    impl.register_module_forward_pre_hook(returning("global"))
    module.register_forward_hook(lambda _, args, out: [*out, "first"])
    module.register_forward_hook(lambda _, args, kwargs, out: [*out, kwargs], **KWARGS)
    module.register_forward_hook(returning(None))
    impl.register_module_forward_hook(lambda _, args, out: [out, "global"])

    arguments = ("global", "plain", "both"), {"k": 2}
    assert module(1, k=0) == [arguments, "global", "first", {"k": 2}]


@for_each("value", [False, 0, "", (), (1,)], ids=repr)
def test_any_value_of_a_forward_hook_replaces_the_output(
    impl: Implementation, value: object
) -> None:
    """Falsy values count, and a tuple is passed on as it is (rule 14)."""
    module = impl.own.Identity()
    module.register_forward_hook(returning(value))
    result = module(1)

    assert (type(result), result) == (type(value), value)


@for_each("kind", ["forward_pre_hook", "forward_hook"])
def test_an_error_in_a_hook_ends_the_call(impl: Implementation, kind: str) -> None:
    """The caller gets it, nothing after the hook runs, and the module stays usable (rule 14)."""
    log: list[str] = []
    module = function_module(impl, lambda x: log.append("forward") or x)
    register = getattr(module, f"register_{kind}")
    register(noting(log, "before"))
    handle = register(raising(KeyError("hook")))
    register(noting(log, "after"))
    with pytest.raises(KeyError, match="hook"):
        module(0)
    ran = [entry for entry in log if entry != "forward"]
    handle.remove()

    assert ran == ["before"]
    assert ("forward" in log) is (kind == "forward_hook")
    assert module(0) == 0


class Unreadable(tuple):
    """Args that cannot be looked through, so that wrapping them fails."""

    __slots__ = ()

    def __iter__(self):
        raise LookupError("wrapping")


def fail_in_wrapping(module: Any) -> None:
    """Make calls of the module raise while the args are wrapped for backward hooks."""
    module.register_forward_pre_hook(returning(Unreadable([leaf()])))
    module.register_full_backward_hook(returning(None))


FAILURE = LookupError("failed")
FAILURES: dict[str, Callable[[Any], object]] = {
    "pre-hook": lambda module: module.register_forward_pre_hook(raising(FAILURE)),
    "wrapping": fail_in_wrapping,
    "forward": lambda module: setattr(module, "forward", raising(FAILURE)),
    "forward hook": lambda module: module.register_forward_hook(raising(FAILURE)),
}


@for_each("place", FAILURES)
def test_always_call_hooks_run_wherever_the_call_fails(impl: Implementation, place: str) -> None:
    """Global ones first, in table order; hooks without the option do not run (rule 18)."""
    log: list[str] = []
    module = impl.own.Identity()
    FAILURES[place](module)
    module.register_forward_hook(noting(log, "plain"))
    module.register_forward_hook(noting(log, "module 1"), always_call=True)
    module.register_forward_hook(noting(log, "module 2"), always_call=True)
    impl.register_module_forward_hook(noting(log, "global"), always_call=True)
    outer = impl.own.Sequential(module)
    outer.register_forward_hook(noting(log, "outer"), always_call=True)
    with pytest.raises(LookupError):
        outer(0)

    # The global hook has run before the module's hook fails, and runs for the outer module too.
    inner = ["global", "module 1", "module 2"]
    assert log == [*inner, "global", "outer"]


@for_each("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_always_call_hooks_do_not_run_for_exit_exceptions(
    impl: Implementation, error: type[BaseException]
) -> None:
    """A BaseException such as KeyboardInterrupt propagates without running the hooks (rule 18)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.forward = raising(error())
    module.register_forward_hook(noting(log, "always"), always_call=True)
    with pytest.raises(error):
        module(0)

    assert log == []


def test_what_always_call_hooks_are_given(impl: Implementation) -> None:
    """The current arguments and output, then what the hook before returned (rules 18 and 19)."""
    calls: list[tuple[Any, ...]] = []
    module = impl.own.Identity()
    module.register_forward_pre_hook(returning(((7,), {"z": 1})), **KWARGS)
    module.register_forward_pre_hook(raising(FAILURE))
    impl.register_module_forward_hook(recording(calls), always_call=True)
    module.register_forward_hook(recording(calls), always_call=True, **KWARGS)
    module.register_forward_hook(returning("returned"), always_call=True)
    module.register_forward_hook(returning(None), always_call=True)
    module.register_forward_hook(recording(calls), always_call=True)
    with pytest.raises(LookupError, match="failed"):
        module(1)

    assert calls == [
        *((module, (7,), None), (module, (7,), {"z": 1}, None), (module, (7,), "returned")),
    ]

    calls.clear()
    module = impl.own.Identity()
    module.register_forward_hook(lambda _, args, out: out + 1)
    module.register_forward_hook(raising(FAILURE))
    module.register_forward_hook(recording(calls), always_call=True)
    with pytest.raises(LookupError, match="failed"):
        module(1)

    assert calls[-1] == (module, (1,), 2)


@for_each("scope", ["module", "global module"])
def test_an_error_in_an_always_call_hook_becomes_a_warning(scope: str) -> None:
    """The next hook runs, and the very exception of forward is raised (rule 20)."""

    def scenario(impl: Implementation) -> object:
        log: list[str] = []
        module = impl.own.Identity()
        module.forward = raising(FAILURE)
        register = module.register_forward_hook
        if scope == "global module":
            register = impl.register_module_forward_hook
        with (
            register(raising(ValueError("one")), always_call=True),
            register(raising(ValueError("two")), always_call=True),
            register(noting(log, "next"), always_call=True),
            pytest.warns(UserWarning, match="silenced") as caught,
            pytest.raises(LookupError) as failed,
        ):
            module(0)
        assert failed.value is FAILURE
        return log, [str(warning.message) for warning in caught]

    text = (
        f"{scope} forward hook with ``always_call=True`` raised an exception that was silenced "
        "as another error was raised in forward: "
    )
    assert same(scenario) == same(lambda impl: (["next"], [f"{text}one", f"{text}two"]))


def test_always_call_hooks_that_have_run_are_not_repeated(impl: Implementation) -> None:
    """Those before the hook that fails, and that hook, ran; those after it run (rules 15 and 21)."""
    log: list[str] = []

    def fail(*_: object) -> None:
        log.append("fails")
        raise FAILURE

    module = impl.own.Identity()
    impl.register_module_forward_hook(noting(log, "global"), always_call=True)
    module.register_forward_hook(noting(log, "before"), always_call=True)
    failing = module.register_forward_hook(fail, always_call=True)
    module.register_forward_hook(noting(log, "plain"))
    module.register_forward_hook(noting(log, "after"), always_call=True)
    with pytest.raises(LookupError, match="failed"):
        module(0)

    assert log == ["global", "before", "fails", "after"]

    log.clear()
    failing.remove()
    module(0)

    assert log == ["global", "before", "plain", "after"]


def test_always_call_hooks_while_compiling(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the compiler they run in calls that succeed, not in those that fail (rule 22)."""
    module = impl.own.Identity()
    module.register_forward_pre_hook(lambda _, args: args[0] + 1)
    module.register_forward_hook(lambda _, args, out: out * 10, always_call=True)
    log: list[str] = []
    failing = impl.own.Identity()
    failing.forward = raising(FAILURE)
    failing.register_forward_hook(noting(log, "always"), always_call=True)
    with monkeypatch.context() as patched, pytest.raises(LookupError, match="failed"):
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        assert module(1) == 20
        failing(0)

    assert log == []
