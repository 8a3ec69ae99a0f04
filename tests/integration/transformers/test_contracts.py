"""Exceptions in the docstrings of the callback are raised as stated.

What it shares with the callback for loops is in tests/unit/averaging/test_callback_contracts.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.integration.transformers.trainers import EMACallback, every, trainer, transformers
from tests.unit.averaging import contracts


def new(folder: Path) -> tuple[Any, Any]:
    """Return a Trainer that has not trained, and its callback."""
    callback = EMACallback(0.9)
    return trainer(folder, callback), callback


def trained(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return a Trainer after two steps, with a checkpoint of each, and its callback."""
    callback = EMACallback(0.9, **options)
    run = trainer(folder, callback, max_steps=2, **every(1, "save"))
    run.train()
    return run, callback


def changed(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return a Trainer whose model has lost its last norm."""
    run, callback = trained(folder, **options)
    run.model.transformer.ln_f = torch.nn.Identity()
    return run, callback


def best_is(step: int, **content: Any) -> Callable[[Path], tuple[Any, Any]]:
    """Return a Trainer whose best checkpoint has another content."""

    def make(folder: Path) -> tuple[Any, Any]:
        run, callback = trained(folder)
        run.args.load_best_model_at_end = True
        run.state.best_global_step = step
        run.state.best_model_checkpoint = str(folder / "checkpoint-1")
        path = folder / "checkpoint-1" / "ema.pt"
        torch.save({**torch.load(path, weights_only=True), **content}, path)
        return run, callback

    return make


Use = Callable[[Any, Any], object]
attach_to_a_model: Use = lambda run, callback: callback.attach(run.model)
attach_another: Use = lambda run, callback: EMACallback(0.9).attach(run)


def create(**options: Any) -> Use:
    """Return a call of the constructor."""
    return lambda run, callback: EMACallback(**options)


def begin(run: Any, callback: Any, **options: Any) -> None:
    """Begin to train."""
    run.create_optimizer_and_scheduler(1)
    optimizer = options.pop("optimizer", run.optimizer)
    model = options.pop("model", run.model)
    callback._is_training = True
    callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)


begin_with_a_model: Use = lambda run, callback: begin(run, callback, optimizer=run.model)
begin_without_names: Use = lambda run, callback: begin(run, EMACallback(0.9, include="head.*"))
begin_unattached: Use = lambda run, callback: callback.on_train_begin(
    run.args, run.state, run.control
)


def resume(run: Any, callback: Any, step: int = 1) -> None:
    """Begin to train from the first checkpoint, as of a step."""
    callback._resumed = Path(run.args.output_dir) / "checkpoint-1"
    run.state.global_step = step
    begin(run, callback)


def resume_without_file(run: Any, callback: Any) -> None:
    """Begin to train from a checkpoint whose model is the average."""
    folder = Path(run.args.output_dir) / "checkpoint-1"
    (folder / "ema.pt").unlink()
    run.state = transformers.TrainerState.load_from_json(folder / "trainer_state.json")
    resume(run, callback)


def end(run: Any, callback: Any) -> None:
    """End a training."""
    callback.on_train_end(run.args, run.state, run.control)


def end_of_another(run: Any, callback: Any) -> None:
    """End the training of a model that has lost its last norm."""
    run.model.transformer.ln_f = torch.nn.Identity()
    end(run, callback)


ROWS: list[tuple[str, type[Exception], Callable[[Path], Any], Callable[[Any, Any], object]]] = [
    ("__init__", ValueError, new, create(save="both")),
    ("attach", TypeError, new, attach_to_a_model),
    ("attach", ValueError, new, attach_another),
    ("on_train_begin", RuntimeError, new, begin_unattached),
    ("on_train_begin", TypeError, new, begin_with_a_model),
    ("on_train_begin", ValueError, new, begin_without_names),
    ("on_train_begin", ValueError, trained, lambda run, callback: resume(run, callback, step=7)),
    ("on_train_begin", ValueError, trained, resume_without_file),
    ("on_train_begin", NameMismatchError, changed, resume),
    ("on_train_end", ValueError, best_is(7), end),
    ("on_train_end", ValueError, best_is(1, version=9), end),
    ("on_train_end", NameMismatchError, best_is(1), end_of_another),
]


@for_each("name, error, make, use", ROWS)
def test_each_exception_is_raised(
    name: str, error: type[Exception], make: Any, use: Any, tmp_path: Path
) -> None:
    """It has the class that the docstring names."""
    run, callback = make(tmp_path)
    with pytest.raises(error):
        use(run, callback)

    assert error.__name__ in contracts.entries(EMACallback, name, "Raises")
