"""Each exception in the docstrings of ``EMACallback`` is raised as stated, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging import contracts
from tests.unit.averaging.recipes import network, set_to, sgd


def begun(change: Callable[[Any], object] = lambda ema: None, **options: Any) -> Any:
    """Return a callback with averages of a network after two updates and a change."""
    ema = modkit.EMACallback(network(), None, 0.5, **options)
    ema.step()
    set_to(ema.model, 2.0)
    ema.step()
    change(ema)
    return ema


def drop_last(ema: Any) -> None:
    """Remove the last layer."""
    del ema.model[3]


def end_and_drop_last(ema: Any) -> None:
    """End the training, with a copy of the average in the model, and remove the last layer."""
    ema.on_train_end()
    drop_last(ema)


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


Make = Callable[[], Any]
changed: Make = lambda: begun(drop_last, swap_to_average_at_end=True)
at_end: Make = lambda: begun(swap_to_average_at_end=True)
with_index: Make = lambda: begun(lambda ema: setattr(ema, "index", 3))
with_infinity: Make = lambda: begun(lambda ema: set_to(ema.model, torch.inf), on_nonfinite="raise")


def do(name: str, *arguments: Any, **options: Any) -> Callable[[Any], object]:
    """Return a call of a method."""
    return lambda ema: getattr(ema, name)(*arguments, **options)


def enter(name: str, **arguments: Any) -> Callable[[Any], None]:
    """Return a call that enters a block."""

    def act(ema: Any) -> None:
        with getattr(ema, name)(**arguments):
            pass

    return act


def in_block(name: str) -> Callable[[Any], object]:
    """Return a call of a method inside `evaluating()`."""

    def act(ema: Any) -> None:
        with ema.evaluating():
            getattr(ema, name)()

    return act


def write(ema: Any) -> None:
    """Give a weight other values in another dtype."""
    ema.model[0].weight.data = torch.zeros(6, 4, dtype=torch.float64)


def write_in(name: str) -> Callable[[Any], None]:
    """Return a call that writes to the weights inside a block in an evaluation."""

    def act(ema: Any) -> None:
        ema.on_validation_start()
        try:
            with getattr(ema, name)():
                write(ema)
        finally:
            ema.on_validation_end()

    return act


def write_and_end(name: str) -> Callable[[Any], None]:
    """Return a call of a hook after a weight of an evaluation was written to."""

    def act(ema: Any) -> None:
        ema.on_validation_start()
        write(ema)
        getattr(ema, name)()

    return act


def create(*arguments: Any, **options: Any) -> Callable[[Any], object]:
    """Return a call of the constructor."""
    return lambda _: modkit.EMACallback(*arguments, **options)


def load_into(model: nn.Module | None, **options: Any) -> Callable[[Any], object]:
    """Return a call that loads the state of a callback into another one."""
    return lambda ema: modkit.EMACallback(model or ema.model, **options).load_state_dict(
        ema.state_dict()
    )


NET, OTHER = network(), network()
STEP = sgd(NET)
PLAIN = dict(network().state_dict())
NO_EMA: Any = lambda: None
START = "on_validation_start"
TRAINING = "evaluating_training_weights"
LOAD = "load_state_dict"
Row = tuple[str, type[Exception], Callable[[], Any], Callable[[Any], object]]
# Member, exception, what makes the callback, and the call that raises.
ROWS: list[Row] = [
    ("__init__", TypeError, NO_EMA, create(NET.parameters())),
    ("__init__", TypeError, NO_EMA, create(NET, nn.Linear(1, 1))),
    ("__init__", TypeError, NO_EMA, create(NET, index="0")),
    ("__init__", TypeError, NO_EMA, create(NET, update_every=1.5)),
    ("__init__", TypeError, NO_EMA, create(NET, decay="0.9")),
    ("__init__", TypeError, NO_EMA, create(NET, warmup=True)),
    ("__init__", ValueError, NO_EMA, create(NET, None, 0.9, schedule=0.9)),
    ("__init__", ValueError, NO_EMA, create(NET, precision="fp8")),
    ("__init__", ValueError, NO_EMA, create(NET, exclude="*")),
    ("__init__", ValueError, NO_EMA, create(NET, [STEP, STEP])),
    ("__init__", ValueError, NO_EMA, create(NET, sgd(OTHER))),
    ("__init__", IndexError, NO_EMA, create(NET, index=1)),
    ("__init__", RuntimeError, NO_EMA, create(NET, device="paper")),
    ("step", NameMismatchError, changed, do("step")),
    ("step", RuntimeError, begun, in_block("step")),
    ("step", RuntimeError, with_infinity, do("step")),
    ("step", ValueError, of_two, do("step")),
    ("step", ValueError, frozen, do("step")),
    ("on_train_end", NameMismatchError, changed, do("on_train_end")),
    ("on_train_end", RuntimeError, begun, write_and_end("on_train_end")),
    ("on_train_end", RuntimeError, at_end, in_block("on_train_end")),
    ("evaluating", IndexError, begun, enter("evaluating", index=1)),
    ("evaluating", IndexError, begun, enter("evaluating", index=-1)),
    ("evaluating", TypeError, begun, enter("evaluating", index="0")),
    ("evaluating", NameMismatchError, changed, enter("evaluating")),
    ("evaluating", RuntimeError, begun, write_in("evaluating")),
    (
        TRAINING,
        NameMismatchError,
        lambda: begun(end_and_drop_last, swap_to_average_at_end=True),
        enter(TRAINING),
    ),
    (TRAINING, RuntimeError, begun, write_in(TRAINING)),
    (START, IndexError, with_index, do(START)),
    (START, NameMismatchError, changed, do(START)),
    ("on_validation_end", RuntimeError, begun, write_and_end("on_validation_end")),
    (LOAD, TypeError, begun, do(LOAD, PLAIN, step="1")),
    (LOAD, ValueError, begun, do(LOAD, PLAIN, step=-1)),
    (LOAD, ValueError, begun, do(LOAD, {"a": 1})),
    (LOAD, ValueError, begun, do(LOAD, {}, step=1)),
    (LOAD, ValueError, begun, lambda ema: ema.load_state_dict(ema.state_dict(), step=1)),
    (LOAD, ValueError, begun, load_into(None, decay=[0.5, 0.5])),
    (LOAD, NameMismatchError, begun, load_into(nn.Linear(1, 1), decay=0.5)),
    (LOAD, RuntimeError, lambda: begun(do(START)), lambda ema: ema.load_state_dict(PLAIN)),
]


@for_each(("name", "error", "make", "use"), ROWS)
def test_each_exception_is_raised(name: str, error: type[Exception], make: Any, use: Any) -> None:
    """It has the class that the docstring names, and leaves averages, weights and counters."""
    ema = make()
    before = None if ema is None else freeze([ema.state_dict(), dict(ema.model.state_dict())])
    with pytest.raises(error):
        use(ema)

    assert error.__name__ in contracts.entries(modkit.EMACallback, name, "Raises")
    assert before is None or freeze([ema.state_dict(), dict(ema.model.state_dict())]) == before
