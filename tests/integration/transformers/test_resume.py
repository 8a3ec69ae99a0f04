from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from modkit import migrations as mig
from tests.integration.transformers.trainers import (
    At,
    EMACallback,
    Normalized,
    average,
    equal,
    every,
    gpt2,
    normalized,
    result,
    trainer,
    weights,
)


# The accumulated batches, the steps to resume from (of two epochs of 6 batches each), the precision, and
# what a checkpoint holds. The model is in bf16 where these round.
CASES = [
    *((1, step, "fp32", save) for step in (1, 6, 9, 12) for save in ("average", "raw")),
    *((2, step, "fp32", "average") for step in (2, 3)),
    *((4, step, "fp32", "average") for step in (1, 2, 4)),
    *((1, 4, precision, "average") for precision in ("fp64", "same", "stochastic")),
    (2, 5, "stochastic", "raw"),
]


def model_of(precision: str) -> Any:
    """Return the model that a precision is for: of 16 bits for those that round."""
    model = gpt2()
    return model.bfloat16() if precision == "stochastic" else model


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what runs without interruption, saving at each step, once for each kind."""

    @cache
    def run(precision: Any, accumulation: int, save: Any) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("whole")
        callback = EMACallback(0.9, precision=precision, save=save)
        whole = trainer(
            folder,
            callback,
            model=model_of(precision),
            gradient_accumulation_steps=accumulation,
            **every(1, "save"),
            **every(2, "eval"),
        )
        whole.train()
        return folder, result(whole, callback)

    return run


@pytest.mark.parametrize(("accumulation", "step", "precision", "save"), CASES)
def test_resume(
    whole_run: Any, tmp_path: Path, accumulation: int, step: int, precision: Any, save: Any
) -> None:
    """Weights, averages and counts after a resume are the bits of a run without interruption."""
    folder, wanted = whole_run(precision, accumulation, save)
    callback = EMACallback(0.9, precision=precision, save=save)
    run = trainer(
        tmp_path,
        callback,
        model=model_of(precision),
        gradient_accumulation_steps=accumulation,
        **every(2, "eval"),
    )

    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))

    assert equal(result(run, callback), wanted)


@pytest.mark.parametrize("save", ["average", "raw"])
@pytest.mark.parametrize("event", ["on_prediction_step", "on_evaluate"])
def test_a_checkpoint_while_evaluating(tmp_path: Path, event: str, save: Any) -> None:
    """A checkpoint that another callback saves in an evaluation holds and resumes the same."""

    def save_now(step: int) -> None:
        held.append(average(callback.ema) if save == "average" else raw[-1])
        whole.save_model(tmp_path / "model")
        whole._save_checkpoint(whole.model, None)

    held: list[Any] = []
    raw: list[Any] = []
    callback = EMACallback(0.9, save=save)
    note = At("on_step_end", lambda _: raw.append(weights(whole.model)), 4)
    whole = trainer(tmp_path, note, callback, At(event, save_now, 4), **every(4, "eval"))
    whole.train()
    again = EMACallback(0.9, save=save)
    run = trainer(tmp_path / "again", again, **every(4, "eval"))
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert equal(result(run, again), result(whole, callback))
    for folder in ("checkpoint-4", "model"):
        loaded = type(run.model).from_pretrained(tmp_path / folder)
        assert equal(weights(loaded), held[-1])


def test_a_resume_keeps_the_best_average(tmp_path: Path) -> None:
    """A best average of before the interruption is the one that is loaded at the end."""
    options = {
        "learning_rate": 1.0,
        **every(1, "eval", "save"),
        "load_best_model_at_end": True,
    }
    callback, again = EMACallback(0.8), EMACallback(0.8)
    whole = trainer(tmp_path, callback, **options)
    whole.train()
    best = whole.state.best_global_step
    run = trainer(tmp_path / "again", again, **options)
    run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{best + 2}"))

    assert equal(weights(run.model), weights(whole.model))
    assert equal(average(again.ema), average(callback.ema))
    assert run.evaluate()["eval_loss"] == whole.state.best_metric


def test_a_checkpoint_without_averages(tmp_path: Path) -> None:
    """It is gone on from with a warning, and averaging starts anew from its weights."""
    plain = trainer(tmp_path, **every(5, "save"))
    plain.train()
    callback = EMACallback(0.9)
    run = trainer(tmp_path / "again", callback)

    with pytest.warns(UserWarning, match="the checkpoint holds no averages"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))

    assert equal(weights(run.model), weights(plain.model))
    assert callback.ema.n_averaged == 7


@pytest.mark.parametrize("only_model", [False, True])
def test_a_checkpoint_that_has_lost_its_averages(tmp_path: Path, only_model: bool) -> None:
    """Without `ema.pt` a model that is the average is refused, and not trained."""
    options = {**every(5, "save"), "save_only_model": only_model}
    trainer(tmp_path, EMACallback(0.9), max_steps=5, **options).train()
    folder = tmp_path / "checkpoint-5"
    (folder / "ema.pt").unlink(missing_ok=only_model)
    callback, steps = EMACallback(0.9), []
    run = trainer(tmp_path / "again", callback, At("on_step_begin", steps.append))

    with pytest.raises(ValueError, match=r"checkpoint-5 is the average, and ema\.pt .* missing"):
        run.train(resume_from_checkpoint=str(folder))
    assert not steps
    assert callback.ema is None


def test_a_checkpoint_with_averages_needs_no_callback(whole_run: Any, tmp_path: Path) -> None:
    """A plain Trainer goes on from it; with `save="raw"` to the weights of the whole run."""
    raw, wanted = whole_run("fp32", 1, "raw")
    average_folder, _ = whole_run("fp32", 1, "average")
    # Evaluations draw random numbers, too.
    options = every(2, "eval")
    run, from_average = (trainer(tmp_path / name, **options) for name in "ab")

    run.train(resume_from_checkpoint=str(raw / "checkpoint-9"))
    from_average.train(resume_from_checkpoint=str(average_folder / "checkpoint-9"))

    found = {f"raw.{name}": value for name, value in weights(run.model).items()}
    assert equal(found, {name: wanted[name] for name in wanted if name.startswith("raw.")})
    assert from_average.state.global_step == 12


@mig.declare({2: [mig.rename("head.**", "out.**")]})
class Renamed(Normalized):
    """The model with a layer renamed."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self._modules.pop("head")

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("out" if name == "head" else name)


@pytest.mark.parametrize("save", ["average", "raw"])
def test_resume_with_a_renamed_layer(tmp_path: Path, save: Any) -> None:
    """Averages and training weights migrate with the model, so the run goes on bitwise."""
    whole, old = (EMACallback(0.9, save=save) for _ in range(2))
    trainer(tmp_path / "whole", whole, model=normalized()).train()
    run = trainer(tmp_path, old, model=normalized(), **every(5, "save"))
    run.train()
    callback = EMACallback(0.9, save=save)
    torch.manual_seed(7)
    resumed = trainer(tmp_path / "resumed", callback, model=Renamed())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))

    expected = {name.replace("head", "out"): value for name, value in whole.ema.named_averages()}
    assert equal(dict(callback.ema.named_averages()), expected)
    weight = whole.ema.model.head.weight
    assert equal({"out": resumed.model.out.weight}, {"out": weight})
