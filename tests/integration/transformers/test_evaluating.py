from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.transformers.trainers import (
    At,
    EMACallback,
    Texts,
    average,
    equal,
    every,
    trainer,
    transformers,
    weights,
)


def loss_of(folder: Path, model: torch.nn.Module) -> float:
    """Return the loss of a model in a Trainer without averages."""
    loss: float = trainer(folder, model=model).evaluate()["eval_loss"]
    return loss


def modes_of(model: torch.nn.Module) -> list[bool]:
    """Return the mode of each module."""
    return [module.training for module in model.modules()]


class Comparing(transformers.Trainer):  # type: ignore[misc]
    """Each evaluation has the metrics of two averages and of the training weights."""

    ema: EMACallback

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate three times, with a prefix each."""
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.ema.ema is not None:
            with self.ema.evaluating(index=1):
                prefix = f"{metric_key_prefix}_slow"
                metrics |= super().evaluate(*args, metric_key_prefix=prefix, **kwargs)
            with self.ema.evaluating_training_weights():
                prefix = f"{metric_key_prefix}_raw"
                metrics |= super().evaluate(*args, metric_key_prefix=prefix, **kwargs)
        return metrics


def test_several_averages_in_one_validation(tmp_path: Path) -> None:
    """In training and after it, metrics with a prefix are those of each average, and of the weights."""
    callback = EMACallback([0.5, 0.9])
    expected: dict[int, dict[str, float]] = {}

    def note(step: int) -> None:
        with callback.evaluating_training_weights():
            expected[step] = {
                "eval_loss": loss_of(tmp_path / "plain", callback.ema.averaged_model(0)),
                "eval_slow_loss": loss_of(tmp_path / "plain", callback.ema.averaged_model(1)),
                "eval_raw_loss": loss_of(tmp_path / "plain", run.model),
            }

    options = every(6, "eval", "save")
    run = trainer(tmp_path, callback, kind=Comparing, **options)
    run.ema = callback
    start = run.evaluate()
    run.add_callback(At("on_evaluate", note))
    run.train()
    logged: dict[int, dict[str, float]] = {}
    for entry in run.state.log_history:
        logged.setdefault(entry["step"], {}).update(entry)

    assert "eval_loss" in start
    assert "eval_raw_loss" not in start
    assert expected.keys() == {6, 12}
    for step, losses in expected.items():
        assert losses == {name: logged[step][name] for name in losses}
        assert len(set(losses.values())) == 3
    assert {name: run.evaluate()[name] for name in expected[12]} == expected[12]


@pytest.mark.parametrize("save", ["average", "raw"])
def test_blocks_around_what_the_user_calls(tmp_path: Path, save: Any) -> None:
    """`evaluate`, `predict` and the model itself see what the block says; the rest is as before."""
    callback = EMACallback([0.5, 0.9], save=save)
    run = trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="there are no averages"), callback.evaluating():
        pass
    with (
        pytest.raises(RuntimeError, match="because nothing was trained"),
        callback.evaluating_training_weights(),
    ):
        pass
    run.train()
    raw = weights(run.model)
    run.model.train()
    run.model.transformer.drop.eval()
    modes = modes_of(run.model)
    blocks = {
        0: (callback.evaluating(), average(callback.ema, 0)),
        1: (callback.evaluating(index=1), average(callback.ema, 1)),
        2: (callback.evaluating_training_weights(), raw),
    }
    for block, expected in blocks.values():
        with block as model:
            assert model is run.model
            assert equal(weights(model), expected)
            assert not any(modes_of(model))
            model.train()
            loss = run.evaluate(metric_key_prefix="eval_x")["eval_x_loss"]
            predicted = run.predict(Texts(4)).predictions
            run.save_model(tmp_path / "saved")
            inside = weights(model)
        saved = weights(type(run.model).from_pretrained(tmp_path / "saved"))
        other = trainer(tmp_path / "plain")
        other.model.load_state_dict(expected)

        assert equal(inside, expected)
        assert loss == other.evaluate()["eval_loss"]
        assert (predicted == other.predict(Texts(4)).predictions).all()
        assert equal(saved, average(callback.ema) if save == "average" else raw)
        assert equal(weights(run.model), raw)
    run.model.train()
    run.model.transformer.drop.eval()
    with callback.evaluating():
        pass
    assert modes_of(run.model) == modes


@pytest.mark.parametrize("name", ["evaluating", "evaluating_training_weights", "applied"])
def test_training_inside_a_block(tmp_path: Path, name: str) -> None:
    """A `train()` where the model may hold the average is refused before it loads or changes anything."""
    callback = EMACallback(0.9)
    run = trainer(tmp_path, callback, **every(6, "save"))
    run.train()
    raw, kept = weights(run.model), average(callback.ema)
    block = callback.ema.applied() if name == "applied" else getattr(callback, name)()
    with block, pytest.raises(RuntimeError, match=r"train\(\) was called inside evaluating\(\)"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))

    assert equal(weights(run.model), raw)
    assert equal(average(callback.ema), kept)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert equal(weights(run.model), raw)


class ScheduleFree(torch.optim.SGD):
    """Changes the weights for an evaluation, and back for the next step, as `schedulefree` does."""

    scale = 1.0

    def eval(self) -> None:
        """Halve the weights, once."""
        self._scale_to(0.5)

    def train(self) -> None:
        """Double them again."""
        self._scale_to(1.0)

    @torch.no_grad()
    def _scale_to(self, scale: float) -> None:
        parameters = [one for group in self.param_groups for one in group["params"]]
        for parameter in parameters if scale != self.scale else []:
            parameter.mul_(scale / self.scale)
        self.scale = scale


def test_evaluation_with_a_schedule_free_optimizer(tmp_path: Path) -> None:
    """It writes to the training weights before the average is swapped in, not to the average."""
    results = []
    for kind in torch.optim.SGD, ScheduleFree:
        callback = EMACallback(0.9)
        run = trainer(tmp_path, callback, max_steps=5, **every(2, "eval"))
        run.optimizer = kind(run.model.parameters(), lr=0.1)
        run.train()
        with callback.evaluating():
            run.evaluate()
        results.append(dict(callback.ema.named_averages()))

    assert equal(results[0], results[1])
