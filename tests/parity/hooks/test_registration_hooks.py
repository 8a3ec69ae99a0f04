from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import leaf
from tests.parity.hooks.tools import recording, returning
from tests.parity.module.contents import contents


# By kind: how a member is made, and the method that registers it.
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "parameter": (lambda: torch.nn.Parameter(torch.ones(1)), "register_parameter"),
    "buffer": (lambda: torch.nn.Buffer(torch.ones(1)), "register_buffer"),
    "module": (torch.nn.Module, "add_module"),
}
WAYS = pytest.mark.parametrize("by_assignment", [False, True], ids=["method", "assignment"])
# Torch's own code runs the hooks of a buffer, and those of a module that is assigned.
CHECKED_WAYS = pytest.mark.parametrize(
    ("kind", "by_assignment"), [("parameter", False), ("parameter", True), ("module", False)]
)


def register_hook(impl: Implementation, kind: str, hook: Callable[..., Any]) -> Any:
    return getattr(impl, f"register_module_{kind}_registration_hook")(hook)


def register(module: Any, kind: str, name: str, value: Any, *, by_assignment: bool) -> None:
    """Register a member, by the method or by assignment."""
    if by_assignment:
        setattr(module, name, value)
    else:
        getattr(module, KINDS[kind][1])(name, value)


def watch(impl: Implementation) -> list[Any]:
    """Return the list in which every registration is noted."""
    log: list[Any] = []

    def note(kind: str) -> Callable[..., None]:
        return lambda _, name, value: log.append((kind, name, None if value is None else "value"))

    for kind in KINDS:
        register_hook(impl, kind, note(kind))
    return log


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_may_replace_the_value_and_chain(
    impl: Implementation, kind: str, by_assignment: bool
) -> None:
    """They get (module, name, value) before it is stored, and what an earlier one returned (rule 16)."""
    make, _ = KINDS[kind]
    calls: list[Any] = []
    values = make(), make(), make()
    module = impl.Module()
    register_hook(impl, kind, lambda module, name, value: calls.append(hasattr(module, name)))
    register_hook(impl, kind, recording(calls))
    register_hook(impl, kind, returning(values[1]))
    register_hook(impl, kind, returning(None))
    register_hook(impl, kind, recording(calls))
    with register_hook(impl, kind, returning(values[2])):
        register(module, kind, "x", values[0], by_assignment=by_assignment)

    assert calls[0] is False
    assert [call[:2] for call in calls[1:]] == [(module, "x")] * 2
    assert calls[1][2] is values[0]
    assert calls[2][2] is values[1]
    assert module.x is values[2]

    register(module, kind, "y", values[0], by_assignment=by_assignment)

    assert module.y is values[1]


def test_which_registrations_are_announced(impl: Implementation) -> None:
    """By methods and assignment, of layers too; None unless it is a parameter (rule 16)."""
    log = watch(impl)
    module = impl.Module()
    module.register_parameter("w", None)
    module.w = torch.nn.Parameter(torch.ones(1))
    module.w = None
    module.register_buffer("b", None)
    module.b = torch.ones(1)
    module.b = None
    module.add_module("c", None)
    module.register_module("c", impl.Module())
    module.c = None

    assert log == [
        ("parameter", "w", "value"),
        *(("buffer", "b", None), ("buffer", "b", "value"), ("buffer", "b", None)),
        *(("module", "c", None), ("module", "c", "value"), ("module", "c", None)),
    ]

    log.clear()
    impl.own.Sequential(impl.own.BatchNorm1d(1))

    assert log == [
        *(("parameter", "weight", "value"), ("parameter", "bias", "value")),
        *(("buffer", "running_mean", "value"), ("buffer", "running_var", "value")),
        *(("buffer", "num_batches_tracked", "value"), ("module", "0", "value")),
    ]


def filled(impl: Implementation) -> Any:
    """Make a module with one member of each kind."""
    module = impl.Module()
    module.w = impl.own.Parameter(torch.ones(1))
    module.register_buffer("b", torch.ones(1))
    module.c = impl.own.Identity()
    return module


def test_assigning_load_and_set_submodule_fire(impl: Implementation) -> None:
    """Both set attributes, which asks the hooks (rule 17)."""
    module = filled(impl)
    state = filled(impl).state_dict()
    log = watch(impl)
    module.load_state_dict(state, assign=True)
    module.set_submodule("c", torch.nn.Module())

    assert log == [
        *(("parameter", "w", "value"), ("buffer", "b", "value"), ("module", "c", "value")),
    ]


@CHECKED_WAYS
@pytest.mark.parametrize("result", ["text", [1], object], ids=str)
def test_what_a_registration_hook_returns_is_checked(
    impl: Implementation, kind: str, result: object, by_assignment: bool
) -> None:
    """A result that is no such member is a TypeError that names class, name and value."""
    module = leaf(impl)
    before = contents(module)
    register_hook(impl, kind, returning(result))
    with pytest.raises(TypeError, match=r"'x' of Leaf .*registration hook returned") as caught:
        register(module, kind, "x", KINDS[kind][0](), by_assignment=by_assignment)

    assert str(caught.value).startswith(
        f"cannot assign '{torch.typename(result)}' object to {kind} "
    )
    assert repr(result)[:6] in str(caught.value)
    assert contents(module) == before


def test_a_refused_result_leaves_the_member_that_was_there(impl: Implementation) -> None:
    """The old parameter stays where a registration hook spoils the new one."""
    module = leaf(impl)
    weight = module.weight
    register_hook(impl, "parameter", returning("text"))
    with pytest.raises(TypeError, match="'weight' of Leaf"):
        module.weight = torch.nn.Parameter(torch.ones(1))

    assert module.weight is weight


@for_each("kind", ["parameter", "module"])
def test_a_later_hook_may_repair_what_an_earlier_one_returned(
    impl: Implementation, kind: str
) -> None:
    """Only what all hooks together make of the value is checked."""
    module = impl.Module()
    repaired = KINDS[kind][0]()
    register_hook(impl, kind, returning("text"))
    register_hook(impl, kind, returning(repaired))
    register(module, kind, "x", KINDS[kind][0](), by_assignment=False)

    assert module.x is repaired
