"""Tiny models and data for the Trainer of transformers, with nothing that is downloaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers import seed_everything


transformers = pytest.importorskip(
    "transformers", reason="needs transformers: nox -s ecosystem installs it"
)
pytest.importorskip("accelerate", reason="needs accelerate: nox -s ecosystem installs it")

# The module needs these packages to be imported.
from modkit.integrations.transformers import EMACallback  # noqa: E402


__all__ = ["EMACallback"]


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards in steps of 1 to 3: something that can be learnt."""

    def __init__(self, count: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(3, 10, (count, 1), generator=generator)
        steps = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = starts + steps * torch.arange(8)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Normalized(torch.nn.Module):
    """A model outside transformers, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss and logits, as the Trainer wants them."""
        hidden = self.norm(self.embedding(input_ids).flatten(0, 1))
        logits = self.head(hidden).unflatten(0, input_ids.shape)
        return {
            "loss": torch.nn.functional.mse_loss(logits.mean(-1), 1.0 / labels),
            "logits": logits,
        }


def normalized() -> torch.nn.Module:
    """Build a model with running statistics."""
    seed_everything()
    return Normalized()


def gpt2() -> Any:
    """Build a decoder with dropout and tied embeddings."""
    seed_everything()
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def arguments(folder: Path, **options: Any) -> Any:
    """Return training arguments for 2 epochs of 6 batches, quiet and on the CPU."""
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        **options,
    }
    return transformers.TrainingArguments(**chosen)


def trainer(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    kind: Any = None,
    hears: Any = None,
    **options: Any,
) -> Any:
    """Return a Trainer of a class and a tiny model, with its `EMACallback` attached."""
    run = (kind or transformers.Trainer)(
        gpt2() if model is None else model,
        arguments(folder, **options),
        train_dataset=Texts(),
        eval_dataset=Texts(8, seed=1),
        compute_metrics=hears,
        callbacks=list(callbacks),
    )
    for one in callbacks:
        if isinstance(one, EMACallback):
            one.attach(run)
    return run


def every(steps: int, *kinds: str) -> dict[str, Any]:
    """Return arguments that evaluate or save, or both, every few steps."""
    strategies = {f"{kind}_strategy": "steps" for kind in kinds}
    return {**strategies, **{f"{kind}_steps": steps for kind in kinds}}


class At(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls a function at an event, with the step: at each, or at one of them."""

    def __init__(self, event: str, call: Callable[[int], object], step: int | None = None) -> None:
        def react(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if step is None or state.global_step == step:
                call(state.global_step)

        setattr(self, event, react)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of what a model holds now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def average(ema: Any, index: int = 0) -> dict[str, torch.Tensor]:
    """Return what the model holds with the average in it."""
    return weights(ema.averaged_model(index))


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return True if two dicts have equal names and bitwise identical tensors."""
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def result(run: Any, callback: EMACallback) -> dict[str, Any]:
    """Return the training weights, the averages and the counts at the end of a run."""
    ema = callback.ema
    assert ema is not None
    averages = [dict(ema.named_averages(index)) for index in range(len(ema.schedules))]
    return {
        **{f"raw.{name}": value for name, value in weights(run.model).items()},
        **{f"{i}.{name}": value for i, one in enumerate(averages) for name, value in one.items()},
        "counts": torch.tensor([ema.step, ema.n_averaged, run.state.global_step]),
    }


def fail(step: int) -> None:
    """Raise an error of a custom class."""
    raise RuntimeError("out of paper")


class VectorModel(torch.nn.Module):
    """One vector, for tests that look at the file and not at the training."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(elements))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss."""
        return {"loss": self.w.sum()}


def vector_trainer(folder: Path, elements: int) -> tuple[Any, EMACallback]:
    """Return a Trainer that has taken a step, ready to save checkpoints, and its callback."""
    callback = EMACallback(0.5)
    run = trainer(folder, callback, model=VectorModel(elements), max_steps=1)
    run.train()
    return run, callback
