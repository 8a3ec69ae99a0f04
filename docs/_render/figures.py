"""The figures that are drawn from data, in docs/_static.

Each file names the digest of its data, so that a check needs neither matplotlib nor equal versions of it. The
colors are legible on light and on dark pages.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _render.stored_results import DOCS, read
from modkit import schedules


GREY, BLUE, ORANGE = "#7a7a7a", "#3d85d0", "#d9730d"
LINES = (GREY, BLUE, ORANGE, "#2f9e5f", "#a45fd0")
STEPS = 1000
SCHEDULES: dict[str, schedules.Schedule] = {
    "Constant(0.999)": schedules.Constant(0.999),
    "Constant(0.99)": schedules.Constant(0.99),
    "CountWarmup(0.999)": schedules.CountWarmup(0.999),
    "Power(sigma_rel=0.1)": schedules.Power(sigma_rel=0.1),
    "Equal()": schedules.Equal(),
}
RATIOS = {
    "load_state_dict(), 3,000 siblings": "load_state_dict(), 3,000 layers",
    "AveragedModel.update_parameters(), 512 small tensors with BatchNorm": (
        "AveragedModel.update_parameters()"
    ),
    "load_state_dict(), 770 tensors": "load_state_dict(), 770 tensors",
    "m.flag = 1": "module.flag = 1",
    "train()": "train(), 500 modules",
    "load_checkpoint(), 5,460 tensors": "load_checkpoint(), 5,460 tensors",
    "load_checkpoint(), 1 GB": "load_checkpoint(), 1 GB",
    "parameters()": "parameters(), 500 modules",
    "20 x (Linear, LayerNorm, ReLU)": "fast_inference, 60 small layers",
    "MLP 8-64-64-4": "fast_inference, MLP",
    "m(x), empty forward": "module(x), empty forward",
    "state_dict()": "state_dict(), 500 modules",
    "ResNet-18, width 64": "fast_inference, ResNet-18",
    "class definition": "class definition",
    "jit.load(), 200 MB in reused memory": "jit.load(), 200 MB",
}
# Rows of the diagram of hooks: kind of hook, what it sees, column.
HOOKS = (
    ("forward pre-hooks", "args, kwargs", 0),
    ("forward()", "", 0),
    ("forward hooks", "args, kwargs, output", 0),
    ("backward pre-hooks", "gradients of the outputs", 1),
    ("backward of the module", "", 1),
    ("backward hooks", "gradients of the inputs", 1),
)
NOTE = "Each kind: the global hooks first, then those of the module, in the order of registration."


def hooks() -> Any:
    """Return the kinds of hooks in their order."""
    return HOOKS


def weights() -> Any:
    """Return the weight of each model in the average after the last step, for each schedule."""
    return {
        name: [round(weight, 9) for weight in schedules.profile(schedule, STEPS)]
        for name, schedule in SCHEDULES.items()
    }


def ratios() -> Any:
    """Return the ratio to torch of some operations, the smallest first."""
    rows = {row["name"]: row["ratio"] for row in read("benchmarks")["rows"]}
    return sorted((rows[name], shown) for name, shown in RATIOS.items() if name in rows)


def growth() -> Any:
    """Return the times of loading on wide and deep trees."""
    rows = read("benchmarks")["growth"]
    return [row for row in rows if row["operation"] == "load_state_dict()"]


def curves() -> Any:
    """Return the losses of the first seed."""
    return {task: runs[0] for task, runs in read("ema_losses").items()}


def average() -> Any:
    """Return the losses on digits of the first seed: training weights, and one average."""
    curves = read("ema_losses")["digits"][0]
    return {"training weights": curves["raw"], "average, decay 0.99": curves["EMA 0.99"]}


def draw_hooks(figure: Any, data: Any) -> None:
    """Draw the boxes of a call and of its backward pass, with arrows in their order."""
    axes = figure.subplots()
    axes.set(xlim=(0, 2), ylim=(-3.6, 0.75))
    axes.set_axis_off()
    centered = {"ha": "center", "va": "center"}
    for column, title in enumerate(("module(x)", "loss.backward()")):
        axes.text(column + 0.5, 0.6, title, family="monospace", color=GREY, **centered)
    for index, (name, sees, column) in enumerate(data):
        x, y, first = column + 0.5, -1.2 * (index % 3), index % 3 == 0
        color = GREY if not sees else (BLUE, ORANGE)[column]
        box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": color}
        axes.text(x, y, name, color=color, bbox=box, **centered)
        axes.text(x, y - 0.43, sees, color=GREY, fontsize=8, **centered)
        if not first:
            arrow = {"arrowstyle": "->", "color": GREY}
            axes.annotate(
                "", (x, y + 0.28), (x, y + (0.6 if sees == "" else 0.9)), arrowprops=arrow
            )
    axes.text(1, -3.4, NOTE, color=GREY, fontsize=7, **centered)


def draw_weights(figure: Any, data: Any) -> None:
    """Draw a line for each schedule, with a linear and with a logarithmic axis."""
    linear, logarithmic = figure.subplots(1, 2)
    for color, (name, values) in zip(LINES, data.items(), strict=True):
        for axes in (linear, logarithmic):
            axes.plot(range(len(values)), values, color=color, label=name)
    linear.set(xlabel="step of the model", ylabel="weight in the average", ylim=(0, 0.013))
    logarithmic.set(xlabel="step of the model", yscale="log", ylim=(1e-6, 1.5))
    first = next(iter(data.values()))[0]
    linear.annotate(
        f"{first:.2f} at step 0",
        (0, 0.0128),
        (90, 0.0118),
        arrowprops={"arrowstyle": "->", "color": GREY},
    )
    linear.legend(
        frameon=False, labelcolor=GREY, fontsize=7, loc="upper left", bbox_to_anchor=(0, 0.86)
    )


def draw_average(figure: Any, data: Any) -> None:
    """Draw the loss of the training weights and of their average."""
    axes = figure.subplots()
    for color, (name, values) in zip((GREY, BLUE), data.items(), strict=True):
        axes.plot(range(1, len(values) + 1), values, color=color, label=name)
    axes.set(xlabel="epoch", ylabel="test loss", ylim=(0, 0.4), xlim=(1, len(values)))
    axes.legend(frameon=False, labelcolor=GREY)


def draw_ratios(figure: Any, data: Any) -> None:
    """Draw a bar for each operation."""
    axes = figure.subplots()
    names, values = [name for _, name in data], [ratio for ratio, _ in data]
    places = range(len(data), 0, -1)
    axes.barh(places, values, color=[BLUE if value <= 1 else ORANGE for value in values])
    axes.set_yticks(places, names)
    for place, value in zip(places, values, strict=True):
        # Not across the line at 1.
        start = 1.02 if 0.75 < value <= 1 else value + 0.02
        axes.text(start, place, f"{value:.2f}", va="center", color=GREY)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="time relative to torch (1 is equal)")


def draw_growth(figure: Any, data: Any) -> None:
    """Draw the time of loading against the number of modules."""
    axes = figure.subplots()
    for row, style in zip(data, ("o-", "s--"), strict=True):
        for name, color in (("torch", ORANGE), ("modkit", BLUE)):
            sizes = row["sizes"][: len(row[name])]
            label = f"{name}, {row['tree']} tree"
            axes.plot(sizes, row[name], style, color=color, label=label, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="modules", ylabel="seconds")
    axes.legend(frameon=False, labelcolor=GREY)


def draw_curves(figure: Any, data: Any) -> None:
    """Draw the losses of the two tasks side by side."""
    titles = {
        "digits": ("Digits, test half", "epoch"),
        "text": ("GPT-2 on text, last tenth", "30 steps"),
    }
    for axes, (task, lines) in zip(figure.subplots(1, 2), data.items(), strict=True):
        for color, (name, values) in zip(LINES, lines.items(), strict=True):
            axes.plot(range(1, len(values) + 1), values, color=color, label=name)
        title, label = titles[task]
        axes.set(yscale="log", xlabel=label)
        axes.set_title(title, color=GREY, loc="left", fontsize=9)
        axes.minorticks_off()
        ticks = [0.1, 0.2, 0.4] if task == "digits" else [2, 2.5, 3]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.legend(frameon=False, labelcolor=GREY, fontsize=7)


FIGURES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None], tuple[float, float]]] = {
    "hooks": (hooks, draw_hooks, (5.0, 3.2)),
    "weights": (weights, draw_weights, (7.0, 3.0)),
    "ratios": (ratios, draw_ratios, (5.2, 3.6)),
    "growth": (growth, draw_growth, (5.0, 3.0)),
    "curves": (curves, draw_curves, (5.4, 2.8)),
    "average": (average, draw_average, (5.0, 2.4)),
}


def digest(data: Any) -> str:
    """Return the digest of what a figure shows."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def path(name: str) -> Path:
    """Return the file of a figure."""
    return DOCS / "_static" / f"{name}.svg"


def stale() -> list[str]:
    """Return the names of the figures that were drawn from other data."""
    found = {name: path(name).read_text("utf-8") if path(name).exists() else "" for name in FIGURES}
    return [
        name for name, (data, *_) in FIGURES.items() if f"data {digest(data())}" not in found[name]
    ]


def draw(names: Iterable[str]) -> None:
    """Draw these figures."""
    for name in names:
        draw_figure(name)


def draw_figure(name: str) -> None:
    """Write one figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = dict.fromkeys(colors, GREY) | {"font.size": 9, "axes.spines.top": False}
    style |= {"axes.spines.right": False, "svg.hashsalt": name, "svg.fonttype": "none"}
    style |= {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
    data, drawing, size = FIGURES[name]
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        found = data()
        drawing(figure, found)
        metadata = {"Date": None, "Creator": None, "Description": f"data {digest(found)}"}
        figure.savefig(path(name), transparent=True, metadata=metadata)
    # matplotlib ends lines with spaces, and repeats its style sheet in each element.
    text = re.sub(r"[ \t]+$", "", path(name).read_text("utf-8"), flags=re.MULTILINE)
    path(name).write_text(text, encoding="utf-8")
