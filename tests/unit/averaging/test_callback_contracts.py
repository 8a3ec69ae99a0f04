"""Each exception in the docstrings of ``EMACallback`` is raised as stated, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.callback import EMAOptions
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging import contracts
from tests.unit.averaging.recipes import network, set_to


def begun(**options: Any) -> Any:
    """Return a callback with averages of a network after two updates."""
    ema = modkit.EMACallback(network(), None, 0.5, **options)
    ema.step()
    set_to(ema.model, 2.0)
    ema.step()
    return ema


def changed() -> Any:
    """Return a callback whose model has lost its last layer since."""
    ema = begun(swap_to_average_at_end=True)
    del ema.model[3]
    return ema


def changed_after_end() -> Any:
    """Return a callback whose model has lost its last layer since training has ended."""
    ema = begun(swap_to_average_at_end=True)
    ema.on_train_end()
    del ema.model[3]
    return ema


def evaluated() -> Any:
    """Return a callback with the average in its model."""
    ema = begun(swap_to_average_at_end=True)
    ema.on_validation_start()
    return ema


def in_block(use: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a call inside `evaluating()`."""

    def call(ema: Any) -> None:
        with ema.evaluating():
            use(ema)

    return call


def with_index(index: Any) -> Any:
    """Return a callback with an index that no average has."""
    ema = begun()
    ema.index = index
    return ema


def enter(name: str, **arguments: Any) -> Callable[[Any], None]:
    """Return a call that enters a block."""

    def call(ema: Any) -> None:
        with getattr(ema, name)(**arguments):
            pass

    return call


def write_in(name: str) -> Callable[[Any], None]:
    """Return a call that writes to the weights inside a block in an evaluation."""

    def call(ema: Any) -> None:
        ema.on_validation_start()
        try:
            with getattr(ema, name)():
                ema.model[0].weight.data = torch.zeros(6, 4)
        finally:
            ema.on_validation_end()

    return call


def write_and_end(name: str) -> Callable[[Any], None]:
    """Return a call of a hook after a weight of an evaluation was written to."""

    def call(ema: Any) -> None:
        ema.on_validation_start()
        ema.model[0].weight.data = torch.zeros(6, 4)
        getattr(ema, name)()

    return call


def spoiled() -> Any:
    """Return a callback of a model that is not finite any more."""
    ema = begun(on_nonfinite="raise")
    set_to(ema.model, torch.inf)
    return ema


def of_two() -> Any:
    """Return a callback whose schedule returns an impossible decay for the second update."""
    ema = modkit.EMACallback(network(), schedule=lambda n: 2.0)
    ema.step()
    return ema


def frozen() -> Any:
    """Return a callback of trainable parameters, of which none is left."""
    ema = modkit.EMACallback(network(), trainable_only=True)
    ema.model.requires_grad_(False)
    return ema


def create(*arguments: Any, **options: Any) -> Callable[[Any], object]:
    """Return a call of the constructor."""
    return lambda _: modkit.EMACallback(*arguments, **options)


def load(state: Any, **options: Any) -> Callable[[Any], object]:
    """Return a call that loads a state."""
    return lambda ema: ema.load_state_dict(state, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of a model."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


NET, OTHER = network(), network()
STEP = sgd(NET)
PLAIN = dict(network().state_dict())
NO_EMA: Any = lambda: None
# Member, exception, what makes the callback, and the call that raises.
ROWS: dict[str, tuple[str, type[Exception], Callable[[], Any], Callable[[Any], object]]] = {
    "parameters": ("__init__", TypeError, NO_EMA, create(NET.parameters())),
    "a layer": ("__init__", TypeError, NO_EMA, create(NET, nn.Linear(1, 1))),
    "index": ("__init__", TypeError, NO_EMA, create(NET, index="0")),
    "steps": ("__init__", TypeError, NO_EMA, create(NET, update_every=1.5)),
    "text": ("__init__", TypeError, NO_EMA, create(NET, decay="0.9")),
    "unknown": ("__init__", TypeError, NO_EMA, create(NET, warmup=True)),
    "both": ("__init__", ValueError, NO_EMA, create(NET, None, 0.9, schedule=0.9)),
    "precision": ("__init__", ValueError, NO_EMA, create(NET, precision="fp8")),
    "nothing": ("__init__", ValueError, NO_EMA, create(NET, exclude="*")),
    "a glob": ("__init__", ValueError, NO_EMA, create(NET, include="head.*")),
    "twice": ("__init__", ValueError, NO_EMA, create(NET, [STEP, STEP])),
    "elsewhere": ("__init__", ValueError, NO_EMA, create(NET, sgd(OTHER))),
    "no average": ("__init__", IndexError, NO_EMA, create(NET, index=1)),
    "a device": ("__init__", RuntimeError, NO_EMA, create(NET, device="paper")),
    "a step": ("step", NameMismatchError, changed, lambda ema: ema.step()),
    "a step of an average": ("step", RuntimeError, begun, in_block(lambda ema: ema.step())),
    "a step of infinity": ("step", RuntimeError, spoiled, lambda ema: ema.step()),
    "a step of two": ("step", ValueError, of_two, lambda ema: ema.step()),
    "a frozen step": ("step", ValueError, frozen, lambda ema: ema.step()),
    "the end": ("on_train_end", NameMismatchError, changed, lambda ema: ema.on_train_end()),
    "the end of a write": ("on_train_end", RuntimeError, begun, write_and_end("on_train_end")),
    "the end in a block": (
        "on_train_end",
        RuntimeError,
        lambda: begun(swap_to_average_at_end=True),
        in_block(lambda ema: ema.on_train_end()),
    ),
    "a block": ("evaluating", IndexError, begun, enter("evaluating", index=1)),
    "a negative block": ("evaluating", IndexError, begun, enter("evaluating", index=-1)),
    "a block of a text": ("evaluating", TypeError, begun, enter("evaluating", index="0")),
    "a block of another": ("evaluating", NameMismatchError, changed, enter("evaluating")),
    "a write": ("evaluating", RuntimeError, begun, write_in("evaluating")),
    "training weights": (
        "evaluating_training_weights",
        NameMismatchError,
        changed_after_end,
        enter("evaluating_training_weights"),
    ),
    "a write to them": (
        "evaluating_training_weights",
        RuntimeError,
        begun,
        write_in("evaluating_training_weights"),
    ),
    "a start": (
        "on_validation_start",
        IndexError,
        lambda: with_index(3),
        lambda ema: ema.on_validation_start(),
    ),
    "a start of another": (
        "on_validation_start",
        NameMismatchError,
        changed,
        lambda ema: ema.on_validation_start(),
    ),
    "an end": ("on_validation_end", RuntimeError, begun, write_and_end("on_validation_end")),
    "statistics": (
        "update_bn",
        IndexError,
        lambda: with_index(3),
        lambda ema: ema.update_bn([torch.zeros(2, 4)]),
    ),
    "statistics of an average": (
        "update_bn",
        RuntimeError,
        begun,
        in_block(lambda ema: ema.update_bn([torch.zeros(2, 4)])),
    ),
    "early statistics": (
        "update_bn",
        RuntimeError,
        lambda: modkit.EMACallback(network()),
        lambda ema: ema.update_bn([torch.zeros(2, 4)]),
    ),
    "statistics of another": (
        "update_bn",
        NameMismatchError,
        changed,
        lambda ema: ema.update_bn([torch.zeros(2, 4)]),
    ),
    "statistics of a number": ("update_bn", TypeError, begun, lambda ema: ema.update_bn(3)),
    "statistics of nothing": ("update_bn", ValueError, begun, lambda ema: ema.update_bn([])),
    "a count": ("load_state_dict", TypeError, begun, load(PLAIN, step="1")),
    "a negative count": ("load_state_dict", ValueError, begun, load(PLAIN, step=-1)),
    "no state": ("load_state_dict", ValueError, begun, load({"a": 1})),
    "an empty state": ("load_state_dict", ValueError, begun, load({}, step=1)),
    "a state with a count": (
        "load_state_dict",
        ValueError,
        begun,
        lambda ema: ema.load_state_dict(ema.state_dict(), step=1),
    ),
    "two averages": (
        "load_state_dict",
        ValueError,
        begun,
        lambda ema: modkit.EMACallback(ema.model, decay=[0.5, 0.5]).load_state_dict(
            ema.state_dict()
        ),
    ),
    "a state of another": (
        "load_state_dict",
        NameMismatchError,
        begun,
        lambda ema: modkit.EMACallback(nn.Linear(1, 1), decay=0.5).load_state_dict(
            ema.state_dict()
        ),
    ),
    "a state in an evaluation": (
        "load_state_dict",
        RuntimeError,
        evaluated,
        lambda ema: ema.load_state_dict(ema.state_dict()),
    ),
}


@for_each("row", list(ROWS.values()), ids=list(ROWS))
def test_each_exception_is_raised(row: Any) -> None:
    """It has the class that the docstring names, and leaves averages, weights and counters."""
    name, error, make, use = row
    ema = make()
    before = None if ema is None else freeze([ema.state_dict(), dict(ema.model.state_dict())])
    with pytest.raises(error):
        use(ema)

    assert error.__name__ in contracts.entries(modkit.EMACallback, name, "Raises")
    assert before is None or freeze([ema.state_dict(), dict(ema.model.state_dict())]) == before


def test_each_exception_has_a_row() -> None:
    """No docstring names an exception that is not tested."""
    tested = {(name, error.__name__) for name, error, *_ in ROWS.values()}

    assert contracts.raised(modkit.EMACallback) == tested


def test_each_member_is_documented() -> None:
    """The docstrings describe arguments and results; options are those that `EMA` describes."""
    options = contracts.entries(EMAOptions, "__init__", "Attributes")

    assert contracts.undocumented(modkit.EMACallback) == []
    assert options == EMAOptions.__annotations__.keys()
    assert options | {"model", "decay"} == contracts.entries(modkit.EMA, "__init__", "Args")
