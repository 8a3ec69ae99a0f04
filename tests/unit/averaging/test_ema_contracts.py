"""Each exception in the docstrings of ``EMA`` is raised as stated, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import modkit
from modkit import schedules
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging import contracts
from tests.unit.averaging.recipes import network, set_to, sgd


def begun(change: Callable[[Any], object] = lambda ema: None, **options: Any) -> Any:
    """Return averages of a network after two updates and a change."""
    ema = modkit.EMA(network(), 0.5, **options)
    ema.update()
    set_to(ema.model, 2.0)
    ema.update()
    change(ema)
    return ema


def held(ema: Any) -> Any:
    """Return the state of averages, and all values of their model."""
    members = ema.model.state_dict().items()
    values = {name: one for name, one in members if not is_lazy(one) and not one.is_meta}
    return freeze(ema.state_dict()), freeze(values)


def copy_in(ema: Any) -> None:
    """Copy an average into the model, until `restore`."""
    ema.store()
    ema.copy_to()


def drop_last(ema: Any) -> None:
    """Remove the last layer."""
    del ema.model[3]


def add_sparse(model: Any) -> Any:
    """Register a sparse parameter."""
    model.adjacency = nn.Parameter(torch.eye(2).to_sparse())
    return model


def add_infinite(ema: Any) -> None:
    """Add a layer that holds infinity."""
    ema.model.append(nn.Linear(2, 1))
    set_to(ema.model[4], torch.inf)


def decay_of_two(ema: Any) -> None:
    """Exchange the schedule for one that returns an impossible decay."""
    ema.schedules[0] = schedules.Custom(lambda n: 2.0)


def drop_memory(ema: Any) -> None:
    """Give a weight memory that takes no values."""
    ema.model[0].bias.data = torch.ones(1).expand(6)


def frozen() -> Any:
    """Return averages of trainable parameters, of which none is left."""
    ema = modkit.EMA(network(), trainable_only=True)
    ema.model.requires_grad_(False)
    return ema


Make = Callable[[], Any]
changed: Make = lambda: begun(drop_last)
copied: Make = lambda: begun(copy_in)
lazy: Make = lambda: modkit.EMA(nn.LazyLinear(2))
on_meta: Make = lambda: modkit.EMA(nn.Linear(2, 2, device="meta"))
sparse: Make = lambda: modkit.EMA(add_sparse(network()))


def inside(use: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a call inside `applied()`."""

    def call(ema: Any) -> None:
        with ema.applied():
            use(ema)

    return call


def enter(**arguments: Any) -> Callable[[Any], None]:
    """Return a call that enters a block."""

    def call(ema: Any) -> None:
        with ema.applied(**arguments):
            pass

    return call


def load(state: Any, **options: Any) -> Callable[[Any], object]:
    return lambda ema: ema.load_state_dict(state, **options)


BATCH = [torch.ones(4, 4)]
PLAIN = network().state_dict()
OTHER = nn.Linear(3, 3)


# The member that states the exception, what makes the averages, and the call that raises it.
ROWS: list[tuple[str, Callable[[], Any], Callable[[Any], object], type[Exception]]] = [
    ("update", begun, lambda ema: ema.update(ema.model.parameters()), TypeError),
    ("update", begun, lambda ema: ema.update(OTHER), NameMismatchError),
    ("update", changed, lambda ema: ema.update(), NameMismatchError),
    ("update", begun, inside(lambda ema: ema.update()), RuntimeError),
    ("update", copied, lambda ema: ema.update(), RuntimeError),
    ("update", lazy, lambda ema: ema.update(), RuntimeError),
    ("update", on_meta, lambda ema: ema.update(), RuntimeError),
    ("update", sparse, lambda ema: ema.update(), RuntimeError),
    ("update", lambda: begun(decay_of_two), lambda ema: ema.update(), ValueError),
    ("update", frozen, lambda ema: ema.update(), ValueError),
    ("rebind", begun, inside(lambda ema: ema.rebind()), RuntimeError),
    ("rebind", copied, lambda ema: ema.rebind(), RuntimeError),
    ("rebind", lazy, lambda ema: ema.rebind(), RuntimeError),
    ("rebind", on_meta, lambda ema: ema.rebind(), RuntimeError),
    (
        "rebind",
        lambda: begun(lambda ema: add_sparse(ema.model)),
        lambda ema: ema.rebind(),
        RuntimeError,
    ),
    (
        "rebind",
        lambda: begun(add_infinite, on_nonfinite="skip"),
        lambda ema: ema.rebind(),
        RuntimeError,
    ),
    (
        "rebind",
        lambda: begun(add_infinite, on_nonfinite="raise"),
        lambda ema: ema.rebind(),
        RuntimeError,
    ),
    ("rebind", lambda: begun(drop_last, include="3.*"), lambda ema: ema.rebind(), ValueError),
    ("attach", begun, lambda ema: ema.attach(5), TypeError),
    ("attach", begun, lambda ema: ema.attach(), ValueError),
    ("attach", begun, lambda ema: ema.attach(sgd(nn.Linear(1, 1))), ValueError),
    ("attach", begun, lambda ema: ema.attach(*[sgd(ema.model)] * 2), ValueError),
    ("update_bn", begun, lambda ema: ema.update_bn(BATCH, index=1), IndexError),
    ("update_bn", begun, lambda ema: ema.update_bn(BATCH, index=""), TypeError),
    ("update_bn", lambda: modkit.EMA(OTHER), lambda ema: ema.update_bn([], index=1), IndexError),
    ("update_bn", begun, lambda ema: ema.update_bn(5), TypeError),
    ("update_bn", begun, lambda ema: ema.update_bn(BATCH, "cpu", call=print), ValueError),
    ("update_bn", begun, lambda ema: ema.update_bn([]), ValueError),
    ("update_bn", changed, lambda ema: ema.update_bn(BATCH), NameMismatchError),
    ("update_bn", copied, lambda ema: ema.update_bn(BATCH), RuntimeError),
    ("update_bn", lambda: modkit.EMA(network()), lambda ema: ema.update_bn(BATCH), RuntimeError),
    ("named_averages", begun, lambda ema: ema.named_averages(1), IndexError),
    ("named_averages", begun, lambda ema: ema.named_averages("0"), TypeError),
    ("applied", begun, enter(index=1), IndexError),
    ("applied", begun, enter(index=True), TypeError),
    ("applied", begun, enter(model=[torch.ones(1)]), TypeError),
    ("applied", begun, enter(model=OTHER), NameMismatchError),
    ("averaged_model", begun, lambda ema: ema.averaged_model(-1), IndexError),
    ("averaged_model", begun, lambda ema: ema.averaged_model(0.5), TypeError),
    ("averaged_model", changed, lambda ema: ema.averaged_model(), NameMismatchError),
    ("module", changed, lambda ema: ema.module, NameMismatchError),
    ("copy_to", begun, lambda ema: ema.copy_to(index=1), IndexError),
    ("copy_to", begun, lambda ema: ema.copy_to(index=None), TypeError),
    ("copy_to", begun, lambda ema: ema.copy_to(ema.model.parameters()), TypeError),
    ("copy_to", begun, lambda ema: ema.copy_to(OTHER), NameMismatchError),
    ("copy_to", lambda: begun(drop_memory), lambda ema: ema.copy_to(), RuntimeError),
    ("store", begun, inside(lambda ema: ema.store()), RuntimeError),
    ("store", copied, lambda ema: ema.store(), RuntimeError),
    ("store", changed, lambda ema: ema.store(), NameMismatchError),
    ("store", lazy, lambda ema: ema.store(), ValueError),
    ("restore", begun, lambda ema: ema.restore(), RuntimeError),
    (
        "restore",
        lambda: begun(lambda ema: (copy_in(ema), drop_last(ema))),
        lambda ema: ema.restore(),
        NameMismatchError,
    ),
    ("decay", begun, lambda ema: setattr(ema, "decay", 0.9), AttributeError),
    ("decay", lambda: begun(decay_of_two), lambda ema: ema.decay, ValueError),
    (
        "load_state_dict",
        on_meta,
        lambda ema: ema.load_state_dict(nn.Linear(2, 2).state_dict(), step=1),
        RuntimeError,
    ),
    ("load_state_dict", begun, load(PLAIN, step=True), TypeError),
    ("load_state_dict", begun, load(5), ValueError),
    ("load_state_dict", begun, load({}, step=1), ValueError),
    (
        "load_state_dict",
        begun,
        lambda ema: ema.load_state_dict(ema.state_dict(), step=1),
        ValueError,
    ),
    ("load_state_dict", begun, load(PLAIN, step=-1), ValueError),
    (
        "load_state_dict",
        begun,
        lambda ema: ema.load_state_dict({**ema.state_dict(), "version": 2}),
        ValueError,
    ),
    (
        "load_state_dict",
        changed,
        lambda ema: ema.load_state_dict(ema.state_dict()),
        NameMismatchError,
    ),
    ("load_state_dict", begun, inside(load({})), RuntimeError),
    ("load_state_dict", sparse, load({**PLAIN, "adjacency": torch.eye(2)}, step=1), RuntimeError),
    ("load_state_dict", copied, load({}), RuntimeError),
]


@for_each(("member", "make", "call", "error"), ROWS)
def test_an_exception_is_stated_and_changes_nothing(
    member: str, make: Any, call: Any, error: type[Exception]
) -> None:
    """The section "Raises" names it, and averages, counters and model stay as they were."""
    ema = make()
    before = held(ema)
    with pytest.raises(error) as caught:
        call(ema)

    assert type(caught.value) is error
    assert error.__name__ in contracts.entries(modkit.EMA, member, "Raises")
    assert held(ema) == before


CONSTRUCTORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": [torch.ones(1)]}, TypeError, "model must be a torch.nn.Module.*Pass the model"),
    ({"model": network().parameters()}, TypeError, "Pass the model"),
    ({"model": PLAIN}, TypeError, "Pass the model"),
    ({"update_every": 2.0}, TypeError, "update_every must be an int, got 2.0"),
    ({"update_after_step": True}, TypeError, "update_after_step must be an int, got True"),
    ({"decay": "0.9"}, TypeError, "EMA: decay must be a number, a schedule or a function of the"),
    ({"decay": [0.5, "0.99"]}, TypeError, "EMA: decay must be a number.* got '0.99'"),
    ({"decay": network()}, TypeError, "decay must be a number.* got the model Sequential"),
    ({"schedule": network()}, TypeError, "schedule must be a number.* got the model Sequential"),
    ({"schedule": schedules.Equal}, TypeError, "EMA: schedule must be .* got <class .*Equal'>"),
    ({"include": 5}, TypeError, "include"),
    ({"exclude": [nn.Linear(1, 1)]}, TypeError, "exclude"),
    ({"buffers": 5}, ValueError, "buffers"),
    ({"decay": 0.999, "schedule": 0.999}, ValueError, "EMA.*decay or schedule, not both"),
    ({"decay": [0.9], "schedule": [schedules.Equal()]}, ValueError, "decay or schedule, not both"),
    ({"decay": []}, ValueError, "decay must not be an empty list"),
    ({"decay": 1.5}, ValueError, "decay"),
    ({"update_every": 0}, ValueError, "update_every must be 1 or more, got 0"),
    ({"update_after_step": -1}, ValueError, "update_after_step must be 0 or more, got -1"),
    ({"seed": "1"}, TypeError, "EMA: seed must be an int, got '1'"),
    ({"seed": -1}, ValueError, "seed must be 0 or more, got -1"),
    ({"device": "meta"}, ValueError, "device is meta, where averages would have no values"),
    ({"precision": "bf16"}, ValueError, "precision must be one of 'same', 'fp32'"),
    ({"buffers": "drop"}, ValueError, "buffers must be one of 'copy', 'average', 'ignore'"),
    ({"buffers": {"*": "drop"}}, ValueError, "buffers must be one of 'copy', 'average', 'ignore'"),
    ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite must be one of 'ignore', 'skip', 'raise'"),
    ({"exclude": "*"}, ValueError, "exclude"),
    ({"include": "head.*"}, ValueError, r"include='head.\*', exclude=None.*select none of the"),
    ({"model": nn.ReLU()}, ValueError, "EMA.*ReLU"),
    ({"model": nn.BatchNorm1d(2, affine=False)}, ValueError, "EMA.*BatchNorm1d"),
    ({"device": "nowhere"}, RuntimeError, "[Dd]evice"),
]


@for_each(("options", "error", "message"), CONSTRUCTORS)
def test_what_the_constructor_refuses_is_stated(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The docstring of the class names the exception, and the message the option and its value."""
    with pytest.raises(error, match=message) as caught:
        modkit.EMA(**{"model": network(), **options})

    assert type(caught.value) is error
    assert error.__name__ in contracts.entries(modkit.EMA, "__init__", "Raises")
