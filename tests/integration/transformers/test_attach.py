from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.transformers.trainers import (
    EMACallback,
    Texts,
    arguments,
    average,
    equal,
    gpt2,
    trainer,
    transformers,
    weights,
)


def test_attach(tmp_path: Path) -> None:
    """A Trainer averages from `attach` on, and keeps its class."""
    run, callback = trainer(tmp_path), EMACallback(0.9)

    returned = callback.attach(run)
    run.train()

    assert returned is callback
    assert callback.attach(run) is callback
    assert type(run) is transformers.Trainer
    assert run.callback_handler.callbacks.count(callback) == 1
    assert callback.ema.n_averaged == 12
    plain = trainer(tmp_path, model=callback.ema.averaged_model())
    assert run.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_remove(tmp_path: Path) -> None:
    """After `remove_callback` the Trainer is a plain Trainer, and the averages are kept."""
    run, callback = trainer(tmp_path), EMACallback(0.9)
    callback.attach(run)
    run.train()
    inside = run.evaluate()["eval_loss"]
    run.remove_callback(callback)

    assert run.evaluate()["eval_loss"] == trainer(tmp_path, model=run.model).evaluate()["eval_loss"]
    assert run.evaluate()["eval_loss"] != inside
    assert callback.ema.n_averaged == 12
    assert not callback.ema._steps.optimizers
    assert callback.attach(run).ema.n_averaged == 12
    assert run.evaluate()["eval_loss"] == inside


def test_an_evaluation_that_the_user_overrides(tmp_path: Path) -> None:
    """All of an overridden `evaluate` sees the average, not its loop alone."""

    class Own(transformers.Trainer):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            inside.append(weights(self.model))
            return super().evaluate(*args, **kwargs)

    inside: list[Any] = []
    callback = EMACallback(0.9)
    run = trainer(tmp_path, callback, kind=Own)
    run.train()
    run.evaluate()

    assert equal(inside[0], average(callback.ema))


def test_refused_trainers(tmp_path: Path) -> None:
    """An object that is not a Trainer, a second callback and a sharded model are refused."""
    run = trainer(tmp_path, EMACallback(0.9))

    with pytest.raises(TypeError, match="Linear is not a transformers"):
        EMACallback().attach(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="the Trainer has one already"):
        EMACallback().attach(run)
    with pytest.raises(ValueError, match="the Trainer has one already"):
        EMACallback(0.99).attach(trainer(tmp_path, EMACallback(0.9)))
    run.is_deepspeed_enabled = True
    with pytest.raises(NotImplementedError, match="sharded"):
        run.train()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_that_is_wrapped_afterwards(tmp_path: Path) -> None:
    """A wrapped model still evaluates its average; another model is evaluated as it is."""
    callback = EMACallback(0.9)
    run = trainer(tmp_path, callback)
    run.train()
    raw, loss = weights(run.model), run.evaluate()["eval_loss"]

    run.model = run.model_wrapped = torch.compile(run.model, backend="eager")
    assert run.evaluate()["eval_loss"] == pytest.approx(loss)
    assert equal(weights(run.model._orig_mod), raw)
    run.model = run.model_wrapped = gpt2()
    assert run.evaluate()["eval_loss"] == trainer(tmp_path, model=gpt2()).evaluate()["eval_loss"]
    run.save_model(tmp_path / "other")
    assert equal(weights(gpt2().from_pretrained(tmp_path / "other")), weights(gpt2()))


# Dynamo looks at the gradients of what stands at a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_that_the_trainer_compiles(tmp_path: Path) -> None:
    """With `torch_compile` evaluations see the average too, by the losses of a model that holds it."""
    callback = EMACallback(0.9)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    run = trainer(tmp_path, callback, eval_strategy="epoch", **compiled)
    run.train()
    other = trainer(tmp_path, model=callback.ema.averaged_model())

    loss = run.evaluate()["eval_loss"]

    assert loss == pytest.approx(other.evaluate()["eval_loss"])
    assert loss != pytest.approx(trainer(tmp_path, model=run.model).evaluate()["eval_loss"])


def test_a_model_that_training_makes(tmp_path: Path) -> None:
    """With `model_init` the model that is averaged is the one that training has made."""
    callback = EMACallback(0.9)
    run = transformers.Trainer(
        args=arguments(tmp_path),
        model_init=gpt2,
        train_dataset=Texts(),
        eval_dataset=Texts(8, seed=1),
    )
    callback.attach(run)
    run.train()

    assert callback.ema.model is run.model
    assert callback.ema.n_averaged == 12
