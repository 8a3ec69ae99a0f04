import gc
import inspect

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from tests.cases import for_each
from tests.helpers import Implementation, clean_global_hooks, same
from tests.parity.hooks.tools import GLOBAL_REGISTRARS, MODULE_REGISTRARS, do_nothing, leaf, noting


@for_each("registrar", MODULE_REGISTRARS)
def test_module_registration_returns_a_removable_handle(
    impl: Implementation, registrar: str
) -> None:
    """Registering any hook on a module returns torch's RemovableHandle (rule 1)."""
    handle = getattr(impl.own.Identity(), registrar)(noting([], "ran"))

    assert type(handle) is RemovableHandle


@for_each("registrar", GLOBAL_REGISTRARS)
def test_global_registration_returns_a_removable_handle(
    impl: Implementation, registrar: str
) -> None:
    """Registering any global hook returns torch's RemovableHandle (rule 1)."""
    handle = getattr(impl, registrar)(do_nothing)

    assert type(handle) is RemovableHandle


def test_handle_ids_come_from_one_counter_shared_with_tensor_hooks(impl: Implementation) -> None:
    """Module, global and tensor hooks draw their ids from the same counter (rule 1)."""
    module = impl.own.Identity()
    first = module.register_forward_hook(do_nothing)
    second = leaf().register_hook(do_nothing)
    third = impl.register_module_forward_pre_hook(do_nothing)
    fourth = module.register_state_dict_pre_hook(do_nothing)

    assert [h.id - first.id for h in (first, second, third, fourth)] == [0, 1, 2, 3]


def test_handle_holds_the_hook_tables_weakly(impl: Implementation) -> None:
    """A handle keeps neither its module's table nor the companion tables alive (rule 1)."""
    module = impl.own.Identity()
    handle = module.register_forward_hook(do_nothing, with_kwargs=True, always_call=True)
    tables = (handle.hooks_dict_ref, *handle.extra_dict_ref)

    assert [table() for table in tables] == [
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]

    del module
    gc.collect()

    assert [table() for table in tables] == [None, None, None]
    assert handle.remove() is None


@for_each("registrar", MODULE_REGISTRARS)
def test_removing_a_handle_twice_is_harmless(impl: Implementation, registrar: str) -> None:
    """The first remove empties the table, the second does nothing (rule 1)."""
    module = impl.own.Identity()
    handle = getattr(module, registrar)(noting([], "ran"))
    table = handle.hooks_dict_ref()
    filled = len(table)
    handle.remove()
    handle.remove()

    assert (filled, len(table)) == (1, 0)


@for_each("registrar", MODULE_REGISTRARS)
def test_handle_as_context_manager_removes_the_hook_on_exit(
    impl: Implementation, registrar: str
) -> None:
    """Leaving the block of a handle removes the hook (rule 1)."""
    module = impl.own.Identity()
    with getattr(module, registrar)(noting([], "ran")) as handle:
        table = handle.hooks_dict_ref()
        inside = list(table)

    assert inside == [handle.id]
    assert list(table) == []


def test_handle_as_context_manager_removes_the_hook_on_an_exception(impl: Implementation) -> None:
    """An exception inside the block removes the hook and passes on (rule 1)."""
    module = impl.own.Identity()
    with pytest.raises(ZeroDivisionError), module.register_forward_hook(do_nothing):
        _ = 1 / 0

    assert len(module._forward_hooks) == 0


def test_removing_a_handle_clears_its_companion_flags(impl: Implementation) -> None:
    """The with_kwargs and always_call marks of a module's hook go away with it (rule 1)."""
    module = impl.own.Identity()
    forward = module.register_forward_hook(do_nothing, with_kwargs=True, always_call=True)
    pre = module.register_forward_pre_hook(do_nothing, with_kwargs=True)

    assert list(module._forward_hooks_with_kwargs) == [forward.id]
    assert list(module._forward_hooks_always_called) == [forward.id]
    assert list(module._forward_pre_hooks_with_kwargs) == [pre.id]

    forward.remove()
    pre.remove()

    assert not module._forward_hooks_with_kwargs
    assert not module._forward_hooks_always_called
    assert not module._forward_pre_hooks_with_kwargs


def test_one_callable_registered_twice_runs_twice(impl: Implementation) -> None:
    """Hooks are stored by id: one callable can be in the table twice (rule 1)."""
    log: list[str] = []
    module = impl.own.Identity()
    hook = noting(log, "ran")
    first = module.register_forward_hook(hook)
    second = module.register_forward_hook(hook)
    module(0)
    first.remove()
    module(0)

    assert list(module._forward_hooks) == [second.id]
    assert log == ["ran", "ran", "ran"]


@for_each(
    ("registrar", "table"),
    [
        ("register_forward_pre_hook", "_forward_pre_hooks"),
        ("register_forward_hook", "_forward_hooks"),
        ("register_full_backward_pre_hook", "_backward_pre_hooks"),
        ("register_full_backward_hook", "_backward_hooks"),
    ],
)
def test_prepend_moves_the_hook_to_the_front_of_the_modules_table(
    impl: Implementation, registrar: str, table: str
) -> None:
    """A prepended hook goes before all earlier hooks of the module, the last one first (rule 2)."""
    log: list[str] = []
    module = impl.own.Identity()
    register = getattr(module, registrar)
    ids = {
        "appended": register(noting(log, "appended")).id,
        "front": register(noting(log, "front"), prepend=True).id,
        "very front": register(noting(log, "very front"), prepend=True).id,
        "last": register(noting(log, "last")).id,
    }
    module(leaf()).sum().backward()

    assert log == ["very front", "front", "appended", "last"]
    assert list(getattr(module, table)) == [ids[name] for name in log]


@for_each(
    ("registrar", "global_registrar"),
    [
        ("register_forward_pre_hook", "register_module_forward_pre_hook"),
        ("register_forward_hook", "register_module_forward_hook"),
        ("register_full_backward_pre_hook", "register_module_full_backward_pre_hook"),
        ("register_full_backward_hook", "register_module_full_backward_hook"),
    ],
)
def test_global_hooks_run_before_prepended_module_hooks(
    impl: Implementation, registrar: str, global_registrar: str
) -> None:
    """No prepend gets a module's hook before a global one of the same kind (rule 2)."""
    log: list[str] = []
    module = impl.own.Identity()
    getattr(module, registrar)(noting(log, "module"), prepend=True)
    with getattr(impl, global_registrar)(noting(log, "global")):
        module(leaf()).sum().backward()

    assert log == ["global", "module"]


@for_each(
    "registrar",
    [name for name in MODULE_REGISTRARS if "state_dict" in name or name.endswith("_backward_hook")],
)
def test_which_module_hooks_can_be_prepended(impl: Implementation, registrar: str) -> None:
    """State-dict, load and non-full backward hooks have no prepend option (rule 2)."""
    parameters = inspect.signature(getattr(impl.Module, registrar)).parameters

    assert ("prepend" in parameters) is (registrar == "register_full_backward_hook")


@for_each("registrar", GLOBAL_REGISTRARS)
def test_global_hooks_cannot_be_prepended(impl: Implementation, registrar: str) -> None:
    """Global hooks have no prepend option (rule 2)."""
    with pytest.raises(TypeError, match="prepend"):
        getattr(impl, registrar)(do_nothing, prepend=True)


@pytest.mark.parametrize("registrar", ["register_forward_hook", "register_forward_pre_hook"])
def test_options_of_forward_hooks_are_keyword_only(impl: Implementation, registrar: str) -> None:
    """A second positional argument to a forward registration is a TypeError (rule 3)."""
    module = impl.own.Identity()
    with pytest.raises(TypeError, match=registrar):
        getattr(module, registrar)(do_nothing, True)


@pytest.mark.parametrize(
    ("registrar", "options"),
    [
        ("register_forward_hook", ["prepend", "with_kwargs", "always_call"]),
        ("register_forward_pre_hook", ["prepend", "with_kwargs"]),
    ],
)
def test_options_of_forward_hooks_default_to_false(
    impl: Implementation, registrar: str, options: list[str]
) -> None:
    """The options of a forward hook are known by name and off by default (rule 3)."""
    parameters = inspect.signature(getattr(impl.Module, registrar)).parameters

    assert list(parameters) == ["self", "hook", *options]
    assert [parameters[name].default for name in options] == [False] * len(options)
    assert {parameters[name].kind for name in options} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "registrar", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_take_prepend_positionally(impl: Implementation, registrar: str) -> None:
    """The second positional argument of a full backward registration is prepend (rule 3)."""
    log: list[str] = []
    module = impl.own.Identity()
    getattr(module, registrar)(noting(log, "first"))
    getattr(module, registrar)(noting(log, "prepended"), True)
    module(leaf()).sum().backward()

    assert log == ["prepended", "first"]


@pytest.mark.parametrize(
    "registrar", ["register_module_forward_hook", "register_module_forward_pre_hook"]
)
def test_global_forward_hooks_take_one_positional_argument(
    impl: Implementation, registrar: str
) -> None:
    """A second positional argument to a global forward registration is a TypeError (rule 3)."""
    with pytest.raises(TypeError, match=registrar):
        getattr(impl, registrar)(do_nothing, True)


def test_global_forward_hook_takes_kwargs_and_always_call_by_name(impl: Implementation) -> None:
    """The two options of a global forward hook are keyword-only and off by default (rule 3)."""
    parameters = inspect.signature(impl.register_module_forward_hook).parameters

    assert {name: (p.kind, p.default) for name, p in parameters.items() if name != "hook"} == {
        "with_kwargs": (inspect.Parameter.KEYWORD_ONLY, False),
        "always_call": (inspect.Parameter.KEYWORD_ONLY, False),
    }


def global_name(registrar: str) -> str:
    """Name the global function that goes with a module's method."""
    return registrar.replace("register_", "register_module_")


FIRST_AND_SECOND = pytest.mark.parametrize(
    ("first", "second"),
    [
        ("register_full_backward_hook", "register_backward_hook"),
        ("register_backward_hook", "register_full_backward_hook"),
    ],
)


@FIRST_AND_SECOND
def test_one_module_cannot_have_full_and_non_full_backward_hooks(first: str, second: str) -> None:
    """The second kind of backward hook on a module is refused with torch's text (rule 4)."""

    def scenario(impl: Implementation) -> None:
        module = impl.own.Identity()
        getattr(module, first)(do_nothing)
        getattr(module, second)(do_nothing)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "on a single Module" in text


@FIRST_AND_SECOND
def test_a_refused_kind_of_backward_hook_is_not_stored(
    impl: Implementation, first: str, second: str
) -> None:
    """After the refusal the module has its first hook only (rule 4)."""
    module = impl.own.Identity()
    handle = getattr(module, first)(do_nothing)
    with pytest.raises(RuntimeError):
        getattr(module, second)(do_nothing)

    assert list(module._backward_hooks) == [handle.id]


@FIRST_AND_SECOND
def test_global_hooks_cannot_be_full_and_non_full(first: str, second: str) -> None:
    """The second kind of global backward hook is refused with torch's text (rule 4)."""

    def scenario(impl: Implementation) -> None:
        with clean_global_hooks():
            getattr(impl, global_name(first))(do_nothing)
            getattr(impl, global_name(second))(do_nothing)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "as a global Module hook" in text


@FIRST_AND_SECOND
def test_removing_some_backward_hooks_does_not_free_a_module_for_the_other_kind(
    first: str, second: str
) -> None:
    """While one hook of a kind is left the other kind is refused (rule 4)."""

    def scenario(impl: Implementation) -> None:
        module = impl.own.Identity()
        getattr(module, first)(do_nothing)
        getattr(module, first)(do_nothing).remove()
        getattr(module, second)(do_nothing)

    assert same(scenario)[:2] == ("raised", "RuntimeError")


@FIRST_AND_SECOND
def test_a_modules_kind_may_differ_from_the_global_kind(
    impl: Implementation, first: str, second: str
) -> None:
    """Module and global backward hooks of different kinds both fire, the full kind last (rule 4)."""
    log: list[str] = []
    module = impl.own.Identity()
    getattr(module, first)(noting(log, first))
    with getattr(impl, global_name(second))(noting(log, second)):
        module(leaf() * 2).sum().backward()

    assert log == ["register_backward_hook", "register_full_backward_hook"]


def test_backward_pre_hooks_go_with_either_kind(impl: Implementation) -> None:
    """Full backward pre-hooks take no side: they run beside non-full hooks (rule 4)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module.register_backward_hook(noting(log, "non-full"))
    module(leaf()).sum().backward()

    assert log == ["pre", "non-full"]


def test_hooks_belong_to_one_instance(impl: Implementation) -> None:
    """A hook on one module is not seen by another of the same class (rule 5)."""
    log: list[str] = []
    hooked, other = impl.own.Identity(), impl.own.Identity()
    hooked.register_forward_hook(noting(log, "ran"))
    other(torch.ones(1))

    assert log == []
    assert len(other._forward_hooks) == 0
