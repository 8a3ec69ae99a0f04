"""Decay schedules: the decay of each averaging step as a function of its number.

A schedule is called with ``n``, the number of steps since the average was a copy of the model, and
returns the decay ``d`` of that step: ``average = d * average + (1 - d) * model``. Step 0 is the
copy, for which every schedule returns 0, and ``n = 1`` is the first step that mixes. With
``update_after_step = a`` and a counter ``step`` that is incremented before it is read, as in most
libraries, ``n = max(0, step - a - 1)``.

Schedules are frozen dataclasses. :meth:`Schedule.to_config` returns their fields for a checkpoint.

Example:
    >>> from modkit import schedules
    >>> warm = schedules.CountWarmup(decay=0.999)
    >>> [round(warm(n), 3) for n in (0, 1, 10, 100, 100_000)]
    [0.0, 0.182, 0.55, 0.918, 0.999]
"""

import importlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from modkit._namespace import publish_all
from modkit.averaging import schedules as _schedules
from modkit.averaging.schedules import *  # noqa: F403 - its __all__ is part of the one below
from modkit.averaging.schedules import Decay, as_schedule, profile


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]
__all__ += _schedules.__all__


def plot(
    schedules: "Decay | Sequence[Decay] | Mapping[str, Decay]",
    n: int,
    update_every: int = 1,
    *,
    axes: "Axes | None" = None,
) -> "Figure":
    """Plot the :func:`profile` of schedules, relative to the plain mean (extra ``modkit[plot]``).

    A long run is drawn in about a thousand points, each the mean of several updates. ``n`` is the
    number of steps since the copy; ``schedules`` may be a dict by label. The default ``axes`` are
    those of a new figure: ``plot(Power(0.1), 1000).savefig("weights.png")``.
    """
    for name, value in (("n", n), ("update_every", update_every)):
        if value < 1:
            raise ValueError(f"plot: {name} must be 1 or more, got {value}")
    if axes is None:
        try:
            figures: Any = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("plot: matplotlib is needed: pip install modkit[plot]") from error
        axes = cast("Axes", figures.Figure(figsize=(4.5, 3.4), layout="constrained").subplots())
    if not isinstance(schedules, Mapping):
        several = schedules if isinstance(schedules, Sequence) else [schedules]
        schedules = {str(as_schedule(one)): one for one in several}
    highest = 1.0
    for label, schedule in schedules.items():
        weights = profile(schedule, n, update_every)
        # The copy is a point of its own, so that the others end at steps with round numbers.
        edges = [0, *range(1, len(weights), max(1, len(weights) // 1000)), len(weights)]
        steps = [(edge - 1) * update_every for edge in edges[1:]]
        parts = [weights[first:last] for first, last in pairwise(edges)]
        heights = [sum(part) / len(part) * len(weights) for part in parts]
        axes.plot(steps, heights, label=label, drawstyle="steps-mid")
        highest = max(highest, *heights)
    axes.set(xlim=(0, n), xlabel="step", yscale="log", ylim=(0.01, 2 * highest))
    axes.set_title("Weight of each step, relative to the plain mean", loc="left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, frameon=False)
    return cast("Figure", axes.figure)


publish_all(globals())
