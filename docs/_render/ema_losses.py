"""The table of losses in docs/averaging.md; figures.py draws the curves.

`python docs/render.py --renew ema_losses` trains for some minutes; it needs the extra `demo`, and transformers.
"""

import importlib
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any, TypeAlias

import torch
from torch import Tensor

import modkit
from _render.markdown import table
from _render.stored_results import read
from modkit import nn, schedules


SEEDS = (0, 1, 2)
EPOCHS = 40
STEPS, EVERY, CONTEXT, BATCH = 600, 30, 64, 32
RAW = "raw"
AVERAGES = {
    "EMA 0.9": schedules.Constant(0.9),
    "EMA 0.99": schedules.Constant(0.99),
    "power, sigma_rel 0.1": schedules.Power(sigma_rel=0.1),
    "SWA": schedules.Equal(),
}
Curves: TypeAlias = dict[str, list[float]]


def digits(seed: int) -> Curves:
    """Train a classifier of digits; return the losses on the other half after each epoch."""
    # Imported here, because the table needs no library.
    load: Any = importlib.import_module("sklearn.datasets").load_digits
    torch.manual_seed(seed)
    pixels, numbers = load(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(numbers)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train_set, test_set = order[:896], order[896:]
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = modkit.EMA(model, schedule=list(AVERAGES.values())).attach(optimizer)

    def test_loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(images[test_set]), labels[test_set]))

    curves: Curves = {name: [] for name in (RAW, *AVERAGES)}
    for _ in range(EPOCHS):
        for batch in train_set[torch.randperm(len(train_set))].split(32):
            optimizer.zero_grad()
            noisy = images[batch] + 0.2 * torch.randn_like(images[batch])
            nn.functional.cross_entropy(model(noisy), labels[batch]).backward()
            optimizer.step()
        curves[RAW].append(test_loss())
        for index, name in enumerate(AVERAGES):
            with ema.applied(index=index):
                curves[name].append(test_loss())
    return curves


def text() -> tuple[Tensor, int]:
    """Return Python's help texts as character indices."""
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    whole = "".join(topics[name] for name in sorted(topics))
    letters = {letter: index for index, letter in enumerate(sorted(set(whole)))}
    return torch.tensor([letters[letter] for letter in whole]), len(letters)


def language_model(seed: int) -> Curves:
    """Train a small GPT-2 of transformers on characters; return the losses on the last tenth."""
    # Imported here, because the table needs no library.
    transformers: Any = importlib.import_module("transformers")
    data, letters = text()
    split = len(data) * 9 // 10
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": CONTEXT}
    config = transformers.GPT2Config(vocab_size=letters, **sizes)
    model: Any = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    ema = modkit.EMA(model, schedule=list(AVERAGES.values())).attach(optimizer)
    held_out = data[split:].unfold(0, CONTEXT, CONTEXT)[:128]

    def test_loss() -> float:
        model.eval()
        with torch.no_grad():
            return float(model(held_out, labels=held_out).loss)

    curves: Curves = {name: [] for name in (RAW, *AVERAGES)}
    for step in range(1, STEPS + 1):
        model.train()
        starts = torch.randint(split - CONTEXT, (BATCH,))
        batch = torch.stack([data[start : start + CONTEXT] for start in starts])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            curves[RAW].append(test_loss())
            for index, name in enumerate(AVERAGES):
                with ema.applied(index=index):
                    curves[name].append(test_loss())
    return curves


def train_all() -> dict[str, list[Curves]]:
    """Train both networks with each seed."""
    torch.set_num_threads(1)
    return {
        "digits": [digits(seed) for seed in SEEDS],
        "text": [language_model(seed) for seed in SEEDS],
    }


def blocks() -> dict[str, str]:
    """Return the table of the last losses: mean and standard deviation over the seeds."""
    runs: dict[str, list[Curves]] = read("ema_losses")
    rows = []
    for name in (RAW, *AVERAGES):
        last = [[curves[name][-1] for curves in runs[task]] for task in ("digits", "text")]
        rows.append([name, *(f"{mean(some):.4f} ± {stdev(some):.4f}" for some in last)])
    return {"curves": table(["weights", "digits", "text"], rows)}
