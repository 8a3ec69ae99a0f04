"""Exceptions in the docstrings of the callback are raised as stated.

What it shares with the callback for loops is in tests/unit/averaging/test_callback_contracts.py.
"""

from types import SimpleNamespace

import pytest
import torch

from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET, EMACallback
from tests.unit.averaging import contracts


pytestmark = QUIET


# The end of an epoch, before Lightning counts it as completed.
EPOCH_END = SimpleNamespace(
    state=SimpleNamespace(fn="fit"),
    fit_loop=SimpleNamespace(
        epoch_progress=SimpleNamespace(current=SimpleNamespace(completed=5, processed=6))
    ),
)


def fitted(folder, **options):
    """Return a model, its callback and the trainer after an epoch, with a step to come."""
    callback = EMACallback(**{"decay": 0.9, "update_starting_at_epoch": 3, **options})
    run = runs.fit(folder, ema=callback, max_epochs=1)
    callback._latest_step = 0
    return run


def with_ema(change, make=fitted, **options):
    """Return what makes a run and changes its model or its callback."""

    def made(folder):
        net, callback, trainer = make(folder, **options)
        change(net, callback)
        return net, callback, trainer

    return made


def drop_last(net, callback):
    """Remove the last layer."""
    del net.net[3]


def end_with_average(net, callback):
    """Let the fit end with the average in the model."""
    callback.swap_to_average_at_end = True


changed = with_ema(drop_last)
at_end = with_ema(end_with_average)
changed_at_end = with_ema(drop_last, at_end)
with_index = with_ema(lambda net, callback: setattr(callback, "index", 3))


def of_two(folder):
    """Return a run whose schedule returns an impossible decay from now on."""
    decays = []
    net, callback, trainer = fitted(folder, decay=None, schedule=lambda n: 2.0 if decays else 0.5)
    decays.append(2.0)
    return net, callback, trainer


def new(folder, **options):
    """Return a run that has not begun."""
    callback = EMACallback(**{"decay": 0.9, **options})
    return runs.Net(), callback, runs.trainer_for(folder, callback)


with_invalid_state = with_ema(lambda net, callback: setattr(callback, "_loaded", {"a": 1}), new)


def with_state_of_another(folder):
    """Return a run that is to resume from the averages of another model."""
    _, other, _ = fitted(folder)
    net, callback, trainer = new(folder)
    callback._loaded = other.ema.state_dict()
    del net.net[3]
    return net, callback, trainer


def with_other_optimizer(folder):
    """Return a run whose optimizer runs no hooks."""
    net, callback, trainer = new(folder)
    trainer.strategy._optimizers = [object()]
    return net, callback, trainer


def hook(name, *arguments):
    """Return a call of a hook as Lightning calls it."""
    return lambda net, callback, trainer: getattr(callback, name)(trainer, net, *arguments)


def create(**options):
    """Return a call of the constructor."""
    return lambda net, callback, trainer: EMACallback(**options)


def inside(use):
    """Return a call inside `EMA.applied()`."""

    def call(net, callback, trainer):
        with callback.ema.applied():
            use(net, callback, trainer)

    return call


def write_and_end(net, callback, trainer):
    """End a validation that has written to a weight."""
    callback._evaluation.start(callback.ema, 0)
    net.net[0].weight.data = torch.zeros(6, 4)
    callback.on_validation_end()


def save(net, callback, trainer):
    """Save a checkpoint at the end of an epoch."""
    EPOCH_END.strategy = trainer.strategy
    state = dict(net.state_dict())
    callback.on_save_checkpoint(EPOCH_END, net, {"state_dict": state, "callbacks": {}})


def load(net, callback, trainer):
    """Load a checkpoint of another model."""
    trainer.state.fn = "fit"
    entry = {"ema": {}, "raw": {"net.0.weight": torch.zeros(1)}}
    checkpoint = {"state_dict": {}, "callbacks": {callback.state_key: entry}}
    callback.on_load_checkpoint(trainer, net, checkpoint)


def start(net, callback, trainer):
    """Start a validation."""
    callback._latest_step = None
    callback.on_validation_start(trainer, net)


end_epoch = lambda net, callback, trainer: callback.on_train_epoch_end(EPOCH_END, net)
members = lambda net, callback, trainer: callback.members_of(trainer, {"state_dict": {}})
read_state = lambda net, callback, trainer: callback.state_dict()


ROWS = [
    ("__init__", TypeError, new, create(update_every_n_steps=1.5)),
    ("__init__", TypeError, new, create(update_starting_at_epoch="1")),
    ("__init__", ValueError, new, create(update_starting_at_step=-1)),
    ("setup", RuntimeError, fitted, inside(hook("setup", "fit"))),
    ("on_fit_start", TypeError, with_other_optimizer, hook("on_fit_start")),
    (
        "on_fit_start",
        ValueError,
        lambda folder: new(folder, include="head.*"),
        hook("on_fit_start"),
    ),
    ("on_fit_start", ValueError, with_invalid_state, hook("on_fit_start")),
    ("on_fit_start", NameMismatchError, with_state_of_another, hook("on_fit_start")),
    ("on_train_batch_end", NameMismatchError, changed, hook("on_train_batch_end")),
    ("on_train_batch_end", RuntimeError, fitted, inside(hook("on_train_batch_end"))),
    ("on_train_batch_end", ValueError, of_two, hook("on_train_batch_end")),
    ("on_train_epoch_end", NameMismatchError, changed, end_epoch),
    ("on_train_epoch_end", RuntimeError, fitted, inside(end_epoch)),
    ("on_train_epoch_end", ValueError, of_two, end_epoch),
    ("on_fit_end", RuntimeError, at_end, inside(hook("on_fit_end"))),
    ("on_fit_end", NameMismatchError, changed_at_end, hook("on_fit_end")),
    ("on_validation_start", IndexError, with_index, start),
    ("on_validation_start", NameMismatchError, changed, start),
    ("on_validation_end", RuntimeError, fitted, write_and_end),
    ("state_dict", NameMismatchError, changed, read_state),
    ("state_dict", RuntimeError, fitted, inside(read_state)),
    ("state_dict", ValueError, of_two, read_state),
    ("on_save_checkpoint", IndexError, with_index, save),
    ("on_save_checkpoint", NameMismatchError, changed, save),
    ("on_save_checkpoint", RuntimeError, fitted, inside(save)),
    ("on_save_checkpoint", ValueError, of_two, save),
    ("members_of", IndexError, with_index, members),
    ("members_of", NameMismatchError, changed, members),
    ("on_load_checkpoint", RuntimeError, fitted, load),
]


@for_each("name, error, make, use", ROWS)
def test_each_exception_is_raised(name, error, make, use, tmp_path) -> None:
    """It has the class that the docstring names."""
    run = make(tmp_path)
    with pytest.raises(error):
        use(*run)

    assert error.__name__ in contracts.entries(EMACallback, name, "Raises")
