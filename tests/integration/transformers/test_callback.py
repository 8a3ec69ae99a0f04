from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.transformers.trainers import (
    At,
    EMACallback,
    average,
    equal,
    every,
    gpt2,
    trainer,
    transformers,
    weights,
)


class Listener(transformers.TrainerCallback):  # type: ignore[misc]
    """Remembers what the model held at each event that is asked for."""

    def __init__(self, *events: str) -> None:
        self.heard: list[tuple[str, int, dict[str, torch.Tensor]]] = []
        for event in events:
            setattr(self, event, self._hear(event))

    def _hear(self, event: str) -> Any:
        def hear(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.heard.append((event, state.global_step, weights(model)))

        return hear


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 12), (4, 4)])
def test_one_update_for_each_step(tmp_path: Path, accumulation: int, steps: int) -> None:
    """Gradients that are accumulated give one update; its average is that of the loop by hand."""
    callback, seen = EMACallback(0.5), Listener("on_step_end")

    trainer(tmp_path, callback, seen, gradient_accumulation_steps=accumulation).train()

    expected = seen.heard[0][2]
    for _, _, now in seen.heard[1:]:
        expected = {name: torch.lerp(old, now[name], 0.5) for name, old in expected.items()}
    assert callback.ema.n_averaged == callback.ema.step == steps
    found = average(callback.ema)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_step_that_a_scaler_leaves_out(tmp_path: Path) -> None:
    """A step with infinite gradients, which a gradient scaler skips, is not an update."""

    def spoil(step: int) -> None:
        for parameter in run.model.parameters():
            parameter.grad.fill_(torch.inf)

    callback, seen = EMACallback(0.5), Listener("on_step_end")
    # The default, the fused optimizer, skips the step on the device without a notice.
    options = {"max_grad_norm": 0, "optim": "adamw_torch"}
    run = trainer(tmp_path, callback, seen, At("on_pre_optimizer_step", spoil, 4), **options)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.train()

    assert run.state.global_step == 12
    assert callback.ema.n_averaged == 11
    held = {step: now for _, step, now in seen.heard}
    assert equal(held[5], held[4])
    assert not equal(held[6], held[5])


def test_evaluations_in_training_see_the_average(tmp_path: Path) -> None:
    """Each evaluation runs on the average of its step, the next step on the training weights."""
    callback, wanted = EMACallback(0.9), {}
    raw: dict[int, Any] = {}

    def note(step: int) -> None:
        wanted[step], raw[step] = average(callback.ema), weights(run.model)

    seen = Listener("on_prediction_step", "on_evaluate", "on_step_begin")
    run = trainer(tmp_path, seen, callback, At("on_step_end", note), **every(2, "eval"))
    run.train()

    evaluated = [step for event, step, _ in seen.heard if event == "on_evaluate"]
    assert evaluated == [2, 4, 6, 8, 10, 12]
    for event, step, held in seen.heard:
        if step:
            assert equal(held, raw[step] if event == "on_step_begin" else wanted[step])
    assert not equal(raw[12], wanted[12])
    assert equal(weights(run.model), raw[12])


def test_before_the_first_update(tmp_path: Path) -> None:
    """Before the first update, evaluations and checkpoints see the training weights."""
    callback, seen = EMACallback(0.5, update_after_step=100), Listener("on_evaluate", "on_step_end")
    run = trainer(
        tmp_path,
        callback,
        seen,
        eval_on_start=True,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    start = weights(run.model)
    first = run.evaluate()["eval_loss"]

    run.train()

    assert first == trainer(tmp_path, model=gpt2()).evaluate()["eval_loss"]
    evaluated = {step: held for event, step, held in seen.heard if event == "on_evaluate"}
    stepped = {step: held for event, step, held in seen.heard if event == "on_step_end"}
    assert equal(evaluated[0], start)
    assert equal(evaluated[6], stepped[6])
    saved = type(run.model).from_pretrained(tmp_path / "checkpoint-6")
    assert equal(weights(saved), stepped[6])


@pytest.mark.parametrize("save", ["average", "raw"])
def test_what_a_checkpoint_holds(tmp_path: Path, save: str) -> None:
    """The model in a checkpoint is what the user chose; it loads without the callback."""
    callback, saved = EMACallback(0.9, save=save), {}

    def note(step: int) -> None:
        saved[step] = average(callback.ema) if save == "average" else weights(run.model)

    run = trainer(
        tmp_path,
        callback,
        At("on_step_end", note),
        **every(5, "save"),
        eval_strategy="epoch",
    )
    run.train()
    run.save_model(tmp_path / "final")

    for folder, step in (("checkpoint-5", 5), ("checkpoint-12", 12), ("final", 12)):
        loaded = type(run.model).from_pretrained(tmp_path / folder)
        assert equal(weights(loaded), saved[step])
    state = torch.load(tmp_path / "checkpoint-5" / "ema.pt", weights_only=True)
    assert state["global_step"] == state["ema"]["n_averaged"] == 5
    assert bool(state["raw"]) == (save == "average")
    assert not (tmp_path / "final" / "ema.pt").exists()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("save", ["average", "raw"])
def test_the_best_model(tmp_path: Path, save: str) -> None:
    """The best average is there at the end, in the averages too, and evaluates to the best metric."""
    callback = EMACallback(0.8, save=save)
    kept: dict[int, Any] = {}

    def note(step: int) -> None:
        kept[step] = average(callback.ema), weights(run.model)

    run = trainer(
        tmp_path,
        callback,
        At("on_step_end", note),
        learning_rate=1.0,
        **every(1, "eval", "save"),
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    run.train()

    best = run.state.best_global_step
    assert best < 12
    assert callback.ema.n_averaged == best
    assert equal(average(callback.ema), kept[best][0])
    assert equal(weights(run.model), kept[best][0 if save == "average" else 1])
    assert run.evaluate()["eval_loss"] == run.state.best_metric


def test_the_average_at_the_end(tmp_path: Path) -> None:
    """On request training ends with the average, and `restore` restores the training weights."""
    callback = EMACallback(0.9, swap_to_average_at_end=True)
    plain = trainer(tmp_path)
    plain.train()
    run = trainer(tmp_path, callback)
    run.train()

    assert equal(weights(run.model), average(callback.ema))
    callback.ema.restore()
    assert equal(weights(run.model), weights(plain.model))
