"""Tiny models and data for the Trainer of transformers, with nothing that is downloaded."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.helpers import seed_everything


os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences, each of which is its own label."""

    def __init__(self, count: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, 32, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2() -> Any:
    """Build a decoder with dropout and tied embeddings."""
    import transformers

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
    import transformers

    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        **options,
    }
    return transformers.TrainingArguments(**chosen)


def trainer(folder: Path, callbacks: Any = (), *, model: Any = None, **options: Any) -> Any:
    """Return a Trainer of a tiny GPT-2."""
    import transformers

    return transformers.Trainer(
        gpt2() if model is None else model,
        arguments(folder, **options),
        train_dataset=Texts(),
        eval_dataset=Texts(8, seed=1),
        callbacks=list(callbacks),
    )
