"""Train with averages, and write the curves and the figures of them into docs/averaging.md.

python docs/render_curves.py             # from docs/curves.json, as it was measured last
python docs/render_curves.py --measure   # train first: some minutes; needs modkit[demo], transformers
"""

import importlib
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import modkit
from modkit.cli import demo


ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "docs" / "curves.json"
FIGURE = ROOT / "docs" / "_static" / "curves.png"
GUIDE = ROOT / "docs" / "averaging.md"
MARKS = "<!-- curves: by docs/render_curves.py -->", "<!-- end of curves -->"
SEEDS = (0, 1, 2)
EPOCHS = 40
STEPS, EVERY, CONTEXT, BATCH = 600, 30, 64, 32


def text() -> tuple[torch.Tensor, int]:
    """Return the help texts that Python brings along, as numbers of characters."""
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    whole = "".join(topics[name] for name in sorted(topics))
    letters = {letter: index for index, letter in enumerate(sorted(set(whole)))}
    return torch.tensor([letters[letter] for letter in whole]), len(letters)


def language_model(seed: int) -> demo.Curves:
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
    ema = modkit.EMA(model, schedule=list(demo.AVERAGES.values())).attach(optimizer)
    held_out = data[split:].unfold(0, CONTEXT, CONTEXT)[:128]

    def test_loss() -> float:
        model.eval()
        with torch.no_grad():
            return float(model(held_out, labels=held_out).loss)

    curves: demo.Curves = {name: [] for name in (demo.RAW, *demo.AVERAGES)}
    for step in range(1, STEPS + 1):
        model.train()
        starts = torch.randint(split - CONTEXT, (BATCH,))
        batch = torch.stack([data[start : start + CONTEXT] for start in starts])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            curves[demo.RAW].append(test_loss())
            for index, name in enumerate(demo.AVERAGES):
                with ema.applied(index=index):
                    curves[name].append(test_loss())
    return curves


def measure() -> None:
    """Train both networks with each seed."""
    torch.set_num_threads(1)
    runs = {
        "digits": [demo.train(EPOCHS, seed) for seed in SEEDS],
        "text": [language_model(seed) for seed in SEEDS],
    }
    FOUND.write_text(json.dumps(runs) + "\n", encoding="utf-8")


def figure(runs: Mapping[str, list[demo.Curves]]) -> Any:
    """Draw the curves of the first seed."""
    drawn = demo.new_figure(2)
    left, right = drawn.axes
    demo.draw_curves(left, runs["digits"][0], "Digits: loss on the test half", "epoch")
    period = f"{EVERY} steps"
    demo.draw_curves(right, runs["text"][0], "GPT-2 on text: loss on the last tenth", period)
    return drawn


def table(runs: Mapping[str, list[demo.Curves]]) -> str:
    """Render the last losses: mean and standard deviation over the seeds."""
    lines = ["| weights | digits | text |", "|---|---|---|"]
    for name in (demo.RAW, *demo.AVERAGES):
        cells: list[str] = []
        for task in ("digits", "text"):
            last = [curves[name][-1] for curves in runs[task]]
            cells.append(f"{statistics.mean(last):.4f} ± {statistics.stdev(last):.4f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render() -> str:
    """Return the guide with the present figures in it."""
    runs: dict[str, list[demo.Curves]] = json.loads(FOUND.read_text(encoding="utf-8"))
    page = GUIDE.read_text(encoding="utf-8")
    start, end = (page.index(mark) for mark in MARKS)
    return f"{page[:start]}{MARKS[0]}\n\n{table(runs)}\n\n{page[end:]}"


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    FIGURE.parent.mkdir(exist_ok=True)
    figure(json.loads(FOUND.read_text(encoding="utf-8"))).savefig(FIGURE)
    GUIDE.write_text(render(), encoding="utf-8")
