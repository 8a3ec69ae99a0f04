"""``python -m modkit demo``: see what averages of weights do, in half a minute."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from modkit import EMA, nn, schedules
from modkit.files.atomic_write import atomic_write


RAW: Final = "raw"
# What is shown of each average: how it is called, and its schedule.
AVERAGES: Final = {
    "EMA 0.9": schedules.Constant(0.9),
    "EMA 0.99": schedules.Constant(0.99),
    "power, sigma_rel 0.1": schedules.Power(sigma_rel=0.1),
    "SWA": schedules.Equal(),
}
Curves = dict[str, list[float]]


def network() -> nn.Sequential:
    """Return a small classifier of images of 8x8 pixels."""
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor]:
    """Return the 1,797 images that scikit-learn brings along, and their labels."""
    try:
        load: Any = importlib.import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise click.ClickException("the demo needs more: pip install modkit[demo]") from error
    images, labels = load(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(
    epochs: int, seed: int, shown: Callable[[range], Iterable[int]] = lambda steps: steps
) -> Curves:
    """Train with a constant, high learning rate, which leaves the raw weights noisy.

    Args:
        epochs: Passes over the training half.
        seed: Of weights, order and noise.
        shown: Wraps the range of epochs, to show the progress.

    Returns:
        The loss on the other half after each epoch: of the raw weights and of each average.
    """
    torch.manual_seed(seed)
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train_set, test_set = order[:896], order[896:]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = EMA(model, schedule=list(AVERAGES.values())).attach(optimizer)

    def test_loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(images[test_set]), labels[test_set]))

    curves: Curves = {name: [] for name in (RAW, *AVERAGES)}
    for _ in shown(range(epochs)):
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


def new_figure(columns: int) -> Any:
    """Return an empty matplotlib figure with axes side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install modkit[plot]") from error
    figure = figures.Figure(figsize=(4.5 * columns, 3.4), dpi=150, layout="constrained")
    figure.subplots(1, columns, squeeze=False)
    return figure


def draw_curves(axes: Any, curves: Mapping[str, Sequence[float]], title: str, label: str) -> None:
    """Draw a line for each sequence of positive figures, one per period; the first is grey."""
    for index, (name, values) in enumerate(curves.items()):
        style = {"color": "0.6"} if index == 0 else {}
        axes.plot(range(1, len(values) + 1), values, ".-", label=name, **style)
    axes.set(yscale="log", xlabel=label)
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, frameon=False)


def table_of(curves: Curves) -> Table:
    """Return the last losses and the best ones."""
    table = Table("weights", title="Loss on the test half", title_justify="left")
    for heading in ("last", "best"):
        table.add_column(heading, justify="right")
    for name, losses in curves.items():
        table.add_row(name, f"{losses[-1]:.4f}", f"{min(losses):.4f}")
    return table


@click.command
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("modkit-demo.png"),
    show_default=True,
    help="Where the figure goes.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def demo(output: Path, epochs: int, seed: int) -> None:
    """Train on handwritten digits; draw the loss of the weights and of four averages of them.

    Beside it the figure shows how much the model of each step counts in each average.
    """
    if not output.parent.is_dir():
        raise click.ClickException(f"there is no directory {output.parent}")
    console = Console()
    try:
        figure = new_figure(2)
        left, right = figure.axes
        curves = train(
            epochs, seed, lambda steps: track(steps, "training", console=console, transient=True)
        )
        schedules.plot(AVERAGES, epochs * 28, axes=left)
        draw_curves(right, curves, "Loss on the test half", "epoch")
        with atomic_write(output) as unfinished:
            figure.savefig(unfinished, format=output.suffix.lstrip(".") or "png")
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    console.print(table_of(curves))
    console.print(f"The figure is {output}", highlight=False)
