import copy
import gc
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch.utils.hooks import RemovableHandle

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, clean_global_hooks, same
from tests.models import parent_and_child
from tests.parity.hooks.tools import (
    GLOBAL_REGISTRARS,
    MODULE_REGISTRARS,
    do_nothing,
    inner_tensor,
    leaf,
    noting,
)


CALL_REGISTRARS = [
    *("register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook"),
    *("register_full_backward_hook", "register_backward_hook"),
]
# Private ones first: they refuse a function that was registered by a public one.
REGISTRARS = sorted((*MODULE_REGISTRARS, *GLOBAL_REGISTRARS))


def global_name(registrar: str) -> str:
    """Name the global function that goes with a module's method."""
    return registrar.replace("register_", "register_module_")


def viewed(impl: Implementation) -> torch.nn.Module:
    """Make a module whose forward is one node of the graph."""

    class Viewed(impl.Module):
        def forward(self, x):
            return x.view(-1)

    return Viewed()


# --- handles ----------------------------------------------------------------------------------------


@for_each("registrar", REGISTRARS)
def test_a_handle_removes_its_hook(impl: Implementation, registrar: str) -> None:
    """Once, or twice, or at the end of a block, from the table of the hook (rule 1)."""
    owner = impl if "_module_" in registrar else impl.own.Identity()
    hook = noting([], "ran")
    handle = getattr(owner, registrar)(hook=hook)
    table = handle.hooks_dict_ref()

    assert type(handle) is RemovableHandle
    assert list(table) == [handle.id]

    handle.remove()
    handle.remove()

    assert list(table) == []

    with pytest.raises(ZeroDivisionError), getattr(owner, registrar)(hook) as handle:
        assert list(table) == [handle.id]
        _ = 1 / 0

    assert list(table) == []


def test_handle_ids_come_from_one_counter_shared_with_tensor_hooks(impl: Implementation) -> None:
    """Module, global and tensor hooks draw their ids from the same counter (rule 1)."""
    module = impl.own.Identity()
    first = module.register_forward_hook(do_nothing)
    second = leaf().register_hook(do_nothing)
    third = impl.register_module_forward_pre_hook(do_nothing)
    fourth = pickle.loads(pickle.dumps(module)).register_state_dict_pre_hook(do_nothing)

    assert [h.id - first.id for h in (first, second, third, fourth)] == [0, 1, 2, 3]


def test_a_handle_refers_to_the_tables_weakly(impl: Implementation) -> None:
    """To the hook's own and those of its options, from which it is removed as well (rule 1)."""
    module = impl.own.Identity()
    options = {"with_kwargs": True, "always_call": True}
    handle = module.register_forward_hook(do_nothing, **options)
    other = module.register_forward_hook(do_nothing, **options)
    tables = (handle.hooks_dict_ref, *handle.extra_dict_ref)
    own = module._forward_hooks, module._forward_hooks_with_kwargs
    own = (*own, module._forward_hooks_always_called)
    handle.remove()

    assert all(table() is mine for table, mine in zip(tables, own, strict=True))
    assert [list(mine) for mine in own] == [[other.id]] * 3

    del module, own
    gc.collect()

    assert [table() for table in tables] == [None, None, None]
    assert other.remove() is None


def test_one_callable_registered_twice_runs_twice(impl: Implementation) -> None:
    """Hooks are stored by id, on one instance (rules 1 and 5)."""
    log: list[str] = []
    module = impl.own.Identity()
    hook = noting(log, "ran")
    first = module.register_forward_hook(hook)
    module.register_forward_hook(hook)
    module(0)
    first.remove()
    module(0)
    impl.own.Identity()(0)

    assert log == ["ran", "ran", "ran"]


# --- options ----------------------------------------------------------------------------------------


@for_each("registrar", [name for name in CALL_REGISTRARS if name != "register_backward_hook"])
def test_prepend_goes_to_the_front_of_the_modules_table(
    impl: Implementation, registrar: str
) -> None:
    """Before all earlier hooks of the module, and after the global ones (rule 2)."""
    log: list[str] = []
    module = impl.own.Identity()
    register = getattr(module, registrar)
    register(noting(log, "appended"))
    register(noting(log, "front"), prepend=True)
    register(noting(log, "very front"), prepend=True)
    register(noting(log, "last"))
    getattr(impl, global_name(registrar))(noting(log, "global"))
    module(leaf()).sum().backward()

    assert log == ["global", "very front", "front", "appended", "last"]


@for_each("registrar", REGISTRARS)
def test_options_of_hooks(registrar: str) -> None:
    """Names, kinds and defaults are torch's; modkit's functions may have further ones (rules 2, 3)."""
    owners = (TORCH, MODKIT) if "_module_" in registrar else (TORCH.Module, MODKIT.Module)
    theirs, ours = (inspect.signature(getattr(owner, registrar)).parameters for owner in owners)
    options = [*theirs.values()][1 if "_module_" in registrar else 2 :]

    assert [*ours][: len(theirs)] == [*theirs]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    assert all(each.default is False for each in options)
    assert ("prepend" in ours) is ("_module_" not in registrar and registrar in CALL_REGISTRARS[:4])
    if "_forward_" in registrar:
        assert {option.kind for option in options} <= {inspect.Parameter.KEYWORD_ONLY}


# --- full and non-full backward hooks ---------------------------------------------------------------


@for_each("removed", [False, True])
@for_each("scope", ["on a single Module", "as a global Module hook"])
@for_each(
    "registrars",
    [
        ("register_full_backward_hook", "register_backward_hook"),
        ("register_backward_hook", "register_full_backward_hook"),
    ],
)
def test_the_two_kinds_of_backward_hooks_exclude_each_other(
    registrars: tuple[str, str], scope: str, removed: bool
) -> None:
    """On a module and among global hooks, also after one was removed (rule 4)."""

    def scenario(impl: Implementation) -> object:
        module = impl.own.Identity()
        registers = [getattr(module, name) for name in registrars]
        if "global" in scope:
            registers = [getattr(impl, global_name(name)) for name in registrars]
        with clean_global_hooks():
            handle = registers[0](do_nothing)
            if removed:
                registers[0](do_nothing).remove()
            with pytest.raises(RuntimeError) as caught:
                registers[1](do_nothing)
            return str(caught.value), list(handle.hooks_dict_ref()) == [handle.id]

    kind, value = same(scenario)

    assert kind == "returned"
    assert scope in value[1][0][1]
    assert value[1][1] == ("bool", "True")


@for_each("global_kind", ["register_full_backward_hook", "register_backward_hook"])
def test_a_modules_kind_may_differ_from_the_global_kind(
    impl: Implementation, global_kind: str
) -> None:
    """Both fire, the full kind last, and pre-hooks go with either (rule 4)."""
    log: list[str] = []
    module = impl.own.Identity()
    for name in ("register_full_backward_hook", "register_backward_hook"):
        owner, registrar = (impl, global_name(name)) if name == global_kind else (module, name)
        getattr(owner, registrar)(noting(log, name))
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module(inner_tensor()).sum().backward()

    assert sorted(log) == ["pre", "register_backward_hook", "register_full_backward_hook"]
    assert log[-1] == "register_full_backward_hook"


# --- global hooks -----------------------------------------------------------------------------------


def test_every_global_registrar_is_covered_here() -> None:
    """The functions tested are all the ones that torch exports."""
    exported = [name for name in torch_module.__all__ if name.startswith("register_module_")]

    assert sorted(GLOBAL_REGISTRARS) == sorted(exported)


@for_each("registrar", GLOBAL_REGISTRARS)
def test_global_hooks_live_in_torchs_tables(registrar: str) -> None:
    """Those of both implementations, from both places of the function, are in one table (rule 1)."""
    functions = [getattr(impl, registrar) for impl in (TORCH, MODKIT)]
    functions.append(getattr(MODKIT.submodule("nn.modules.module"), registrar))
    handles = [function(do_nothing) for function in functions]

    assert list(handles[0].hooks_dict_ref()) == [handle.id for handle in handles]


def test_the_kind_of_global_backward_hooks_is_torchs(impl: Implementation) -> None:
    """The mark of which kind is in use holds for both implementations (rule 4)."""
    impl.register_module_full_backward_hook(do_nothing)

    assert torch_module._global_is_full_backward_hook is True
    for each in (TORCH, MODKIT):
        with pytest.raises(RuntimeError, match="Please use only one"):
            each.register_module_backward_hook(do_nothing)


@for_each("registrar", CALL_REGISTRARS)
@for_each("called", [TORCH, MODKIT], ids=str)
def test_global_hooks_fire_across_implementations(
    impl: Implementation, called: Implementation, registrar: str
) -> None:
    """A global hook of either implementation fires for the modules of both."""
    log: list[str] = []
    getattr(impl, global_name(registrar))(noting(log, "fired"))
    module = viewed(called)
    module(inner_tensor()).sum().backward()

    assert log == ["fired"]


# --- bad hooks --------------------------------------------------------------------------------------


@for_each("hook", [None, "text", lambda: None, lambda a, b, c, d, e, f, g, h, i: None])
@for_each("registrar", REGISTRARS)
def test_a_hook_that_cannot_be_called_fails_when_it_is_due(registrar: str, hook: object) -> None:
    """Registration takes anything; the call, save or load raises Python's error."""

    def scenario(impl: Implementation) -> object:
        with clean_global_hooks():
            module = viewed(impl)
            getattr(impl if "_module_" in registrar else module, registrar)(hook)
            module(inner_tensor()).sum().backward()
            module.load_state_dict(module.state_dict())
            impl.own.Sequential(impl.own.BatchNorm1d(1))

    kind, error, text = same(scenario)

    assert (kind, error) in {("raised", "TypeError"), ("raised", "AttributeError")}, text


def test_a_hook_before_init_fails_alike() -> None:
    """Registering on a module whose __init__ did not run is torch's AttributeError."""

    def scenario(impl: Implementation) -> object:
        class NoInit(impl.Module):
            def __init__(self) -> None:
                pass

        NoInit().register_forward_hook(print)

    assert same(scenario)[:2] == ("raised", "AttributeError")


# --- copies -----------------------------------------------------------------------------------------


def pickled(module: torch.nn.Module) -> torch.nn.Module:
    """Send the module through pickle."""
    return pickle.loads(pickle.dumps(module))


def saved(module: torch.nn.Module) -> torch.nn.Module:
    """Send the module through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


RAN: list[object] = []


def note_module(module: object, *_arguments: object) -> None:
    """Be a hook that can be pickled, and note the module that it is called with."""
    RAN.append(module)


@pytest.mark.parametrize("route", [copy.deepcopy, pickled, saved])
def test_copies_have_the_hooks(impl: Implementation, route) -> None:
    """In tables of their own, with the same ids and options, called with the copy (rule 5)."""
    module = impl.own.Identity()
    module.register_forward_pre_hook(note_module, with_kwargs=True)
    handle = module.register_forward_hook(note_module, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(note_module)
    module.register_full_backward_hook(note_module)
    module.register_state_dict_pre_hook(note_module)
    module._register_state_dict_hook(note_module)
    module.register_load_state_dict_pre_hook(note_module)
    module.register_load_state_dict_post_hook(note_module)
    copied = route(module)
    tables = {name: list(table) for name, table in vars(module).items() if "hooks" in name}
    handle.remove()

    assert {name: list(getattr(copied, name)) for name in tables} == tables
    assert all(len(table) == 1 for table in tables.values())
    assert not module._forward_hooks

    RAN.clear()
    copied(leaf()).sum().backward()
    copied.load_state_dict(copied.state_dict())

    assert len(RAN) == 8
    assert all(each is copied for each in RAN)


def test_a_handle_that_is_pickled_with_its_module_removes_the_copys_hook(
    impl: Implementation,
) -> None:
    """The handle refers to the table of the copy (rule 1)."""
    module = impl.own.Identity()
    handle = module.register_forward_hook(do_nothing)
    copied, copied_handle = pickle.loads(pickle.dumps((module, handle)))
    copied_handle.remove()

    assert len(copied._forward_hooks) == 0
    assert list(module._forward_hooks) == [handle.id]


def test_bound_method_hooks_follow_the_copied_module(impl: Implementation) -> None:
    """A method of the module itself becomes a method of the copy in the copy's table (rule 5)."""

    class Counts(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_forward_hook(self.count)

        def count(self, module, args, output) -> None:
            self.calls += 1

        def forward(self, x):
            return x

    original = Counts()
    copied = copy.deepcopy(original)
    copied(0)
    copied(0)
    original(0)

    assert (original.calls, copied.calls) == (1, 2)


def test_hooks_survive_conversion_and_modes(impl: Implementation) -> None:
    """to, train, eval, requires_grad_, zero_grad and loading leave all hooks in place."""
    module = parent_and_child(impl)
    handle = module.c.register_forward_hook(do_nothing)
    module.double().eval().train().requires_grad_(requires_grad=False).zero_grad()
    module.load_state_dict(module.state_dict(), assign=True)
    module.to_empty(device="cpu")

    assert list(module.c._forward_hooks) == [handle.id]
