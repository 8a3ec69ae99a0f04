"""Train runs of several lengths, and compare averages whose windows are parts of the run.

    python examples/decay_sweep.py                  # a table and three pictures, half an hour
    python examples/decay_sweep.py --task digits    # two minutes

Each run is averaged with all windows at once: `sweep.svg`. `average.svg` follows one run on digits,
averaged with the default. `weights.svg` has the weight of each model in an average. The text are the help pages of Python. Digits need scikit-learn, the
pictures matplotlib: `python -m pip install ".[demo]"`.
"""

import argparse
import importlib
import pydoc_data.topics
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

import modkit
from modkit import nn, schedules


STEPS = {"digits": (280, 1120, 4480), "text": (300, 900, 2700)}
# Steps in an epoch of the digits.
EPOCH = 28
# Windows as parts of the run.
PARTS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
RATES = ("constant", "cosine")
RAW, DEFAULT = "training weights", "default"
GREY = "#7a7a7a"
COLORS = ("#3d85d0", "#d9730d", "#2f9e5f", "#a45fd0")


class Task(NamedTuple):
    """A model with its optimizer, its loss in training and its test."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_loss: Callable[[], torch.Tensor]
    test_loss: Callable[[], torch.Tensor]


def digits() -> Task:
    """Return a classifier of handwritten digits, trained with noise."""
    load: Any = importlib.import_module("sklearn.datasets").load_digits
    pixels, numbers = load(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(numbers)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train_set, test_set = order[:896], order[896:]
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

    def train_loss() -> torch.Tensor:
        batch = train_set[torch.randint(len(train_set), (32,))]
        noisy = images[batch] + 0.2 * torch.randn_like(images[batch])
        return nn.functional.cross_entropy(model(noisy), labels[batch])

    def test_loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(images[test_set]), labels[test_set])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Task(model, optimizer, train_loss, test_loss)


class Decoder(nn.Module):
    """A transformer of two layers that predicts the next character, as GPT-2 does."""

    def __init__(self, letters: int, context: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, 64)
        self.places = nn.Embedding(context, 64)
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(64), enable_nested_tensor=False
        )
        self.head = nn.Linear(64, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map characters (batch, length) to logits of the next ones."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.letters(text) + self.places.weight[:length]
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def text() -> Task:
    """Return a transformer that predicts the characters of Python's help pages."""
    topics: dict[str, str] = pydoc_data.topics.topics
    whole = "".join(topics[name] for name in sorted(topics))
    letters = {letter: index for index, letter in enumerate(sorted(set(whole)))}
    data = torch.tensor([letters[letter] for letter in whole])
    context, split = 32, len(data) * 9 // 10
    held_out = data[split:].unfold(0, context + 1, context + 1)[:256]
    model = Decoder(len(letters), context)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def train_loss() -> torch.Tensor:
        starts = torch.randint(split - context - 1, (16,))
        return loss(torch.stack([data[start : start + context + 1] for start in starts]))

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    return Task(model, optimizer, train_loss, lambda: loss(held_out))


def window(steps: float) -> Callable[[int], float]:
    """Return the decay that remembers so many steps, without a share of the untrained model.

    It is 1 - 1 / steps, divided by the sum of all weights so far, as in Adam and optax.
    """
    decay = 1 - 1 / steps
    return lambda n: decay * (1 - decay**n) / (1 - decay ** (n + 1))


def optimize(task: Task, steps: int, rate: str) -> Iterator[int]:
    """Train, and yield the number of each step after it."""
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(task.optimizer, T_max=steps)
    for step in range(1, steps + 1):
        task.optimizer.zero_grad()
        task.train_loss().backward()
        task.optimizer.step()
        if rate == "cosine":
            annealing.step()
        yield step


def train(name: str, steps: int, rate: str, seed: int) -> dict[str, float]:
    """Train once; return the loss of the training weights and of each average."""
    torch.manual_seed(seed)
    task = {"digits": digits, "text": text}[name]()
    decays: dict[str, Any] = {DEFAULT: schedules.CountWarmup(0.999)}
    for part in PARTS:
        # A window of one step is the training weights.
        if part * steps > 1:
            decays[f"{part:g}"] = window(part * steps)
    ema = modkit.EMACallback(task.model, task.optimizer, schedule=[*decays.values()])
    for _ in optimize(task, steps, rate):
        pass

    with ema.evaluating_training_weights(), torch.no_grad():
        losses = {RAW: task.test_loss().item()}
    for index, label in enumerate(decays):
        with ema.evaluating(index=index), torch.no_grad():
            losses[label] = task.test_loss().item()
    return losses


def sweep(tasks: list[str], seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each task, learning rate and length: the losses of all seeds."""
    for task in tasks:
        for rate in RATES:
            for steps in STEPS[task]:
                runs = [train(task, steps, rate, seed) for seed in range(seeds)]
                losses = {label: [run[label] for run in runs] for label in runs[0]}
                yield {"task": task, "rate": rate, "steps": steps, "losses": losses}


def follow(steps: int, every: int) -> dict[str, list[float]]:
    """Train on digits at a constant learning rate; return losses of the weights and their average.

    It is the first run of this length in the sweep.
    """
    torch.manual_seed(0)
    task = digits()
    ema = modkit.EMA(task.model).attach(task.optimizer)
    losses: dict[str, list[float]] = {RAW: [], "their average, EMA(net)": []}
    for step in optimize(task, steps, "constant"):
        if step % every:
            continue
        with torch.no_grad():
            losses[RAW].append(task.test_loss().item())
            with ema.applied():
                losses["their average, EMA(net)"].append(task.test_loss().item())
    return losses


def style(axes: Any, title: str = "") -> None:
    """Draw axes in grey, which is legible on light and on dark pages."""
    axes.set_title(title, color=GREY, loc="left", fontsize=9)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, fontsize=8)


def draw_sweep(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss of each window, relative to the training weights of its run."""
    tasks = sorted({row["task"] for row in rows})
    figure = Figure(figsize=(3.5 * len(tasks), 4.6), layout="constrained")
    panels = figure.subplots(len(RATES), len(tasks), squeeze=False, sharex=True)
    for i, rate in enumerate(RATES):
        for j, task in enumerate(tasks):
            axes = panels[i, j]
            chosen = [row for row in rows if (row["task"], row["rate"]) == (task, rate)]
            for color, row in zip(COLORS, chosen, strict=False):
                losses = row["losses"]
                raw = mean(losses[RAW])
                parts = [part for part in PARTS if f"{part:g}" in losses]
                percents = [100 * part for part in parts]
                ratios = [mean(losses[f"{part:g}"]) / raw for part in parts]
                label = f"{row['steps']:,} steps"
                axes.plot(percents, ratios, "o-", markersize=3, color=color, label=label)
            axes.axhline(1, color=GREY, linestyle="--", linewidth=0.8)
            axes.set(xscale="log", xticks=[0.3, 1, 3, 10, 30])
            axes.set_xticklabels(["0.3", "1", "3", "10", "30"])
            axes.minorticks_off()
            style(axes, f"{task}, {rate} learning rate")
    figure.supxlabel("window, % of the run", color=GREY, fontsize=9)
    figure.supylabel("loss / loss of the training weights", color=GREY, fontsize=9)
    save(figure, path)


def draw_run(losses: dict[str, list[float]], every: int, path: Path) -> None:
    """Draw the test losses of one run."""
    figure = Figure(figsize=(5.0, 2.4), layout="constrained")
    axes = figure.subplots()
    for color, (label, values) in zip((GREY, COLORS[0]), losses.items(), strict=True):
        steps = range(every, every * len(values) + 1, every)
        axes.plot(steps, values, color=color, label=label)
    axes.set(xlabel="step", ylabel="test loss", xlim=(0, None), ylim=(0, 0.4))
    style(axes)
    save(figure, path)


def draw_weights(n: int, path: Path) -> None:
    """Draw the weight of each model in averages after n steps, which begin with a copy."""
    shown = {
        "Constant(0.999)": schedules.Constant(0.999),
        "Constant(0.99)": schedules.Constant(0.99),
        "CountWarmup(0.999)": schedules.CountWarmup(0.999),
        "Power(sigma_rel=0.1)": schedules.Power(sigma_rel=0.1),
        "Equal()": schedules.Equal(),
    }
    figure = Figure(figsize=(7.0, 3.0), layout="constrained")
    linear, logarithmic = figure.subplots(1, 2)
    for color, (label, schedule) in zip((GREY, *COLORS), shown.items(), strict=True):
        weights = schedules.profile(schedule, n)
        for axes in linear, logarithmic:
            axes.plot(range(n + 1), weights, color=color, label=label)
    first = schedules.profile(0.999, n)[0]
    linear.annotate(f"{first:.2f} at step 0", (0.08, 0.93), xycoords="axes fraction", color=GREY)
    linear.set(xlabel="step of the model", ylabel="weight in the average", ylim=(0, 0.013))
    logarithmic.set(xlabel="step of the model", yscale="log", ylim=(1e-6, 1))
    for axes in linear, logarithmic:
        style(axes)
    linear.get_legend().set_loc("center left")
    logarithmic.get_legend().remove()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture without a date, and without spaces at the ends of lines."""
    # Text stays text, and the same data give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Run the sweep, print a table, and draw the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", choices=STEPS, action="append", help="default: both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures")
    options = parser.parse_args()
    torch.set_num_threads(1)

    tasks = options.task or [*STEPS]
    rows: list[dict[str, Any]] = []
    for row in sweep(tasks, options.seeds):
        rows.append(row)
        print(f"{row['task']}, {row['rate']} learning rate, {row['steps']:,} steps")
        for label, losses in row["losses"].items():
            deviation = stdev(losses) if len(losses) > 1 else 0.0
            print(f"  {label:>16}  {mean(losses):.4f} ± {deviation:.4f}", flush=True)
    draw_sweep(rows, options.out / "sweep.svg")
    draw_weights(1000, options.out / "weights.svg")
    if "digits" in tasks:
        length = STEPS["digits"][1]
        draw_run(follow(length, EPOCH), EPOCH, options.out / "average.svg")


if __name__ == "__main__":
    main()
