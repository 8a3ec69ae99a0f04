"""Train with averages, and write the curves and the figures of them into docs/averaging.md.

python docs/render_curves.py             # from docs/curves.json, as it was measured last
python docs/render_curves.py --measure   # train first: some minutes; needs modkit[demo], transformers
"""

import importlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.figure import Figure
from torch import Tensor

import modkit
from modkit import nn, schedules


ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "docs" / "curves.json"
FIGURE = ROOT / "docs" / "_static" / "curves.png"
GUIDE = ROOT / "docs" / "averaging.md"
MARKS = "<!-- curves: by docs/render_curves.py -->", "<!-- end of curves -->"
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
    # Without it, the figures can still be drawn.
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
    """Return the help texts that Python brings along, as numbers of characters."""
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    whole = "".join(topics[name] for name in sorted(topics))
    letters = {letter: index for index, letter in enumerate(sorted(set(whole)))}
    return torch.tensor([letters[letter] for letter in whole]), len(letters)


def language_model(seed: int) -> Curves:
    """Train a small GPT-2 of transformers on characters; return the losses on the last tenth."""
    # Without it, the figures can still be drawn.
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


def measure() -> None:
    """Train both networks with each seed."""
    torch.set_num_threads(1)
    runs = {
        "digits": [digits(seed) for seed in SEEDS],
        "text": [language_model(seed) for seed in SEEDS],
    }
    FOUND.write_text(json.dumps(runs) + "\n", encoding="utf-8")


def draw(axes: Any, curves: Mapping[str, Sequence[float]], title: str, label: str) -> None:
    """Draw a line for each sequence of losses, one per period; the first is grey."""
    for index, (name, values) in enumerate(curves.items()):
        style = {"color": "0.6"} if index == 0 else {}
        axes.plot(range(1, len(values) + 1), values, ".-", label=name, **style)
    axes.set(yscale="log", xlabel=label)
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, frameon=False)


def figure(runs: Mapping[str, list[Curves]]) -> Figure:
    """Draw the curves of the first seed."""
    drawn = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    left, right = drawn.subplots(1, 2)
    draw(left, runs["digits"][0], "Digits: loss on the test half", "epoch")
    draw(right, runs["text"][0], "GPT-2 on text: loss on the last tenth", f"{EVERY} steps")
    return drawn


def table(runs: Mapping[str, list[Curves]]) -> str:
    """Render the last losses: mean and standard deviation over the seeds."""
    lines = ["| weights | digits | text |", "|---|---|---|"]
    for name in (RAW, *AVERAGES):
        cells: list[str] = []
        for task in ("digits", "text"):
            last = [curves[name][-1] for curves in runs[task]]
            cells.append(f"{statistics.mean(last):.4f} ± {statistics.stdev(last):.4f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render() -> str:
    """Return the guide with the present figures in it."""
    runs: dict[str, list[Curves]] = json.loads(FOUND.read_text(encoding="utf-8"))
    page = GUIDE.read_text(encoding="utf-8")
    start, end = (page.index(mark) for mark in MARKS)
    return f"{page[:start]}{MARKS[0]}\n\n{table(runs)}\n\n{page[end:]}"


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    FIGURE.parent.mkdir(exist_ok=True)
    figure(json.loads(FOUND.read_text(encoding="utf-8"))).savefig(FIGURE)
    GUIDE.write_text(render(), encoding="utf-8")
