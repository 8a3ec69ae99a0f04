"""Why ``Trainer(callbacks=[EMACallback()])`` is refused: what a callback of events alone does wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from tests.integration.transformers.trainers import (
    At,
    EMACallback,
    Texts,
    average,
    equal,
    fail,
    trainer,
    transformers,
    weights,
)


class Events(transformers.TrainerCallback):  # type: ignore[misc]
    """Swaps the average in where an evaluation is due, and out after it: all that events allow."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start averaging."""
        self.ema = modkit.EMA(kwargs["model"], 0.9).attach(kwargs["optimizer"].optimizer)
        self.block: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Swap the average in before an evaluation that is known of."""
        if control.should_evaluate:
            self.block = self.ema.applied()
            self.block.__enter__()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Swap it out again."""
        if self.block is not None:
            self.block.__exit__(None, None, None)
            self.block = None


class Attached(EMACallback):
    """The callback of modkit, with the decay of `Events`."""

    def __init__(self) -> None:
        super().__init__(0.9)


class Seen:
    """Remembers the weights of each evaluation, the average and the training weights of its step."""

    def __init__(self, folder: Path, kind: Any, *others: Any, **options: Any) -> None:
        self.callback = kind()
        self.evaluated: list[Any] = []
        self.averages: dict[int, Any] = {}
        self.trained: dict[int, Any] = {}
        look = At("on_prediction_step", lambda _: self.evaluated.append(weights(self.run.model)))
        # The first event after a step, before a callback may swap.
        note = At("on_optimizer_step", self.note)
        self.run = trainer(folder, note, self.callback, *others, look, max_steps=4, **options)

    def note(self, step: int) -> None:
        """Remember what the step has given."""
        self.averages[step + 1] = average(self.callback.ema)
        self.trained[step + 1] = weights(self.run.model)


each_kind = pytest.mark.parametrize(("kind", "is_right"), [(Events, False), (Attached, True)])


def test_the_events_suffice_for_the_evaluation_of_a_schedule(tmp_path: Path) -> None:
    """Without an error, the Trainer's own evaluations see the average in either way."""
    for kind in Events, Attached:
        seen = Seen(tmp_path, kind, eval_strategy="steps", eval_steps=4)
        seen.run.train()

        assert equal(seen.evaluated[0], seen.averages[4])
        assert equal(weights(seen.run.model), seen.trained[4])


@each_kind
def test_an_error_in_an_evaluation(tmp_path: Path, kind: Any, is_right: bool) -> None:
    """No event follows an error: what the user saves as the training weights is the average."""
    error = At("on_prediction_step", fail)
    seen = Seen(tmp_path, kind, error, eval_strategy="steps", eval_steps=4)
    with pytest.raises(RuntimeError, match="out of paper"):
        seen.run.train()
    held = weights(seen.run.model)

    assert equal(held, seen.trained[4]) == is_right
    assert equal(held, seen.averages[4]) != is_right


@each_kind
def test_an_evaluation_that_the_user_calls(tmp_path: Path, kind: Any, is_right: bool) -> None:
    """No event comes before it: it sees the training weights."""
    seen = Seen(tmp_path, kind)
    seen.run.train()
    seen.run.evaluate()
    seen.run.predict(Texts(4))

    for held in seen.evaluated:
        assert equal(held, seen.averages[4]) == is_right
        assert equal(held, seen.trained[4]) != is_right


class Asks(transformers.TrainerCallback):  # type: ignore[misc]
    """Requests an evaluation at the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request it."""
        control.should_evaluate = state.global_step == 3


@each_kind
def test_an_evaluation_that_a_later_callback_requests(
    tmp_path: Path, kind: Any, is_right: bool
) -> None:
    """A callback cannot know what those after it request: the evaluation sees the training weights."""
    seen = Seen(tmp_path, kind, Asks())
    seen.run.train()

    assert equal(seen.evaluated[0], seen.averages[3]) == is_right
    assert equal(seen.evaluated[0], seen.trained[3]) != is_right


@each_kind
def test_several_evaluation_sets(tmp_path: Path, kind: Any, is_right: bool) -> None:
    """Each set has its `on_evaluate`, so the second one sees the training weights."""
    seen = Seen(tmp_path, kind, eval_strategy="steps", eval_steps=4)
    seen.run.eval_dataset = {"a": Texts(4), "b": Texts(4)}
    seen.run.train()
    first, second = seen.evaluated

    assert equal(first, seen.averages[4])
    assert equal(second, seen.averages[4]) == is_right
    assert equal(second, seen.trained[4]) != is_right


@each_kind
def test_the_best_model(tmp_path: Path, kind: Any, is_right: bool) -> None:
    """No event comes before a save: the best checkpoint is not what had the best metric."""
    options: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps"}
    options |= {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    seen = Seen(tmp_path, kind, learning_rate=1.0, **options)
    seen.run.train()
    best = seen.run.state.best_global_step
    loaded = weights(seen.run.model)
    plain = trainer(tmp_path / "plain", model=seen.run.model)

    assert equal(loaded, seen.averages[best]) == is_right
    assert (plain.evaluate()["eval_loss"] == seen.run.state.best_metric) == is_right


def test_a_callback_that_is_not_attached(tmp_path: Path) -> None:
    """So a callback that was only passed to a Trainer is refused before the first step."""
    run = trainer(tmp_path)
    run.add_callback(EMACallback(0.9))
    before = weights(run.model)
    with pytest.raises(RuntimeError, match=r"Call callback\.attach\(trainer\) before train\(\)"):
        run.train()

    assert equal(weights(run.model), before)
    assert run.state.global_step == 0
    assert not any(torch.is_tensor(p.grad) for p in run.model.parameters())
