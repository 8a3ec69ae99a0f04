"""Figures of averages, for people who would rather look."""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from modkit.averaging._schedule import Schedule
from modkit.averaging.schedules import profile


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS: Final = 1000
_SMALL: Final = 9
# Below a hundredth of the plain mean a step counts as good as nothing.
_LEAST: Final = 0.01


def new_figure(columns: int) -> "tuple[Figure, list[Axes]]":
    """Return an empty figure with axes side by side, in the style of all figures here.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install modkit[plot]") from error
    figure: Figure = figures.Figure(figsize=(4.5 * columns, 3.4), dpi=150, layout="constrained")
    return figure, [figure.add_subplot(1, columns, index + 1) for index in range(columns)]


def _finish(axes: "Axes", title: str, label: str) -> None:
    """Give axes what all of them have."""
    axes.set_title(title, loc="left", fontsize=_SMALL)
    axes.set_xlabel(label, fontsize=_SMALL)
    axes.tick_params(labelsize=_SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=_SMALL, frameon=False)


def points(schedule: Schedule, n: int, update_every: int) -> tuple[list[float], list[float]]:
    """Return how much the model of each step counts, relative to the plain mean of all steps.

    Args:
        schedule: The decay.
        n: Steps since the copy, 1 or more.
        update_every: The steps between updates.

    Returns:
        Steps, at most about a thousand, and their weights: 1 is that of the plain mean. In a long run
        a point is the mean of the updates up to it.
    """
    weights = profile(schedule, n, update_every)
    together = max(1, len(weights) // _POINTS)
    # The copy is a point of its own, so that the others end at steps with round numbers.
    parts = [weights[:1]] + [
        weights[first : first + together] for first in range(1, len(weights), together)
    ]
    last = [min(index * together, len(weights) - 1) for index in range(len(parts))]
    return [float(index * update_every) for index in last], [
        sum(part) / len(part) * len(weights) for part in parts
    ]


def draw_profiles(
    axes: "Axes", schedules: Mapping[str, Schedule], n: int, update_every: int
) -> None:
    """Draw how much past steps count in each average."""
    highest = 1.0
    for name, schedule in schedules.items():
        steps, weights = points(schedule, n, update_every)
        axes.plot(steps, weights, label=name, drawstyle="steps-mid")
        highest = max(highest, *weights)
    axes.set(xlim=(0, n), yscale="log", ylim=(_LEAST, 2 * highest))
    _finish(axes, "What each step counts (1: as in the plain mean)", "step")


def draw_curves(
    axes: "Axes", curves: Mapping[str, Sequence[float]], title: str, label: str
) -> None:
    """Draw one line for each sequence of positive figures, one a period; the first is in grey."""
    for index, (name, values) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": "0.6"} if index == 0 else {}
        axes.plot(range(1, len(values) + 1), values, ".-", label=name, **style)
    axes.set_yscale("log")
    _finish(axes, title, label)


def profile_figure(schedules: Sequence[Schedule], n: int, update_every: int = 1) -> "Figure":
    """Return a figure of the weights of past steps."""
    figure, (axes,) = new_figure(1)
    draw_profiles(axes, {str(schedule): schedule for schedule in schedules}, n, update_every)
    return figure
