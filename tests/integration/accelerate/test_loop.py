from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from tests.helpers import freeze


pytest.importorskip("accelerate", reason="needs accelerate: nox -s ecosystem installs it")


@pytest.fixture
def train() -> Any:
    """Return the loop."""
    from tests.integration.accelerate.loop import train_with_accelerate

    return train_with_accelerate


def ends(result: Any) -> Any:
    """Return what a run ends with: weights, averages, counts and the loss of the average."""
    model, ema, loss = result
    return freeze([dict(model.state_dict()), ema.state_dict(), loss])


def test_one_update_for_each_step(train: Any, tmp_path: Path) -> None:
    """Gradients of two batches are one step and one update, and the saved model is the average."""
    from safetensors.torch import load_file

    model, ema, _ = train(tmp_path, epochs=2)

    assert ema.n_averaged == ema.step == 8
    saved = load_file(tmp_path / "average" / "model.safetensors")
    averages = dict(ema.named_averages())
    assert freeze(saved) == freeze({name: averages[name] for name in saved})
    raw = dict(model.state_dict())
    assert not torch.equal(raw["0.weight"], averages["0.weight"])


def test_resume(train: Any, tmp_path: Path) -> None:
    """A run from a checkpoint at the first step, in an epoch or at its end has the bits of a whole one."""
    whole = ends(train(tmp_path / "whole", save_every=2))

    for batches in (2, 6, 8, 14):
        resumed = train(tmp_path, resume_from=str(tmp_path / "whole" / f"batch-{batches}"))

        assert ends(resumed) == whole


def test_the_wrapper_of_prepare_is_refused() -> None:
    """The error says to attach the optimizer inside, which counts the steps that are taken."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    ema = modkit.EMA(model)
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*attach\(optimizer\.optimizer\)"):
        ema.attach(optimizer)
    ema.attach(optimizer.optimizer)
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()

    assert ema.n_averaged == 3
