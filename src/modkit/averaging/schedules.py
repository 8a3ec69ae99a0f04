"""Decays that change in training: each schedule tells the decay of every averaging step.

A schedule is called with ``n``, the number of steps since the average was a copy of the model, and
returns the decay ``d`` of that step: ``average = d * average + (1 - d) * model``. Step 0 is the
copy itself, so every schedule gives 0 there, and ``n = 1`` is the first step that mixes. With
``update_after_step = a`` and a counter ``step`` that is incremented before it is read, as most
libraries have it, ``n = max(0, step - a - 1)``.

Schedules are frozen dataclasses: they compare, hash, print and pickle by their numbers, and
:meth:`Schedule.to_config` turns them into a dict of plain numbers for a checkpoint.

Example:
    >>> from modkit import schedules
    >>> warm = schedules.CountWarmup(decay=0.999)
    >>> [round(warm(n), 3) for n in (0, 1, 10, 100, 100_000)]
    [0.0, 0.182, 0.55, 0.918, 0.999]
    >>> schedules.from_config(warm.to_config()) == warm
    True
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from modkit.averaging._schedule import (
    Config,
    Schedule,
    gamma_of,
    sigma_rel_of,
)
from modkit.averaging._schedules_with_models import BEMA, Window


__all__ = [
    "BEMA",
    "Constant",
    "CountWarmup",
    "Custom",
    "Equal",
    "ExponentialRamp",
    "HalfLife",
    "HalfLifeFraction",
    "InverseGamma",
    "LinearRamp",
    "Power",
    "Schedule",
    "Window",
    "as_schedule",
    "from_config",
    "gamma_of",
    "profile",
    "sigma_rel_of",
]


@dataclass(frozen=True)
class Constant(Schedule):
    """The same decay at every step.

    Args:
        decay: How much of the average is kept, from 0 to 1; ``1 / (1 - decay)`` steps are
            remembered.

    Example:
        >>> Constant(0.9)(5)
        0.9
    """

    decay: float = 0.999

    @override
    def decay_at(self, n: int) -> float:
        return self.decay

    @override
    def decay_over(self, n: int, k: int) -> float:
        return self.decay**k


@dataclass(frozen=True)
class HalfLife(Schedule):
    """A constant decay, named by the number of steps after which a model counts half as much.

    ``d = 2 ** (-1 / half_life)``. This is how Composer names the decay.

    Args:
        half_life: A number of steps, more than 0.

    Example:
        >>> round(HalfLife(1000).over(5000, 1000), 12)
        0.5
    """

    half_life: float

    @override
    def decay_at(self, n: int) -> float:
        return math.pow(2.0, -1 / self.half_life)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return math.pow(2.0, -k / self.half_life)


@dataclass(frozen=True)
class HalfLifeFraction(Schedule):
    """A half-life that is always the same fraction of the run so far.

    ``d = 2 ** (-1 / (fraction * (n + step_bias)))``, as torchtitan has it: the average fits runs of
    any length, and one that continues.

    Args:
        fraction: The half-life divided by the number of steps taken, more than 0.
        step_bias: Added to the number of steps, so that the average does not begin so fast.

    Example:
        >>> slow = HalfLifeFraction(0.05)
        >>> slow(20_000) == HalfLife(1000)(1)
        True
    """

    fraction: float = 0.05
    step_bias: float = 0.0

    @override
    def decay_at(self, n: int) -> float:
        return math.pow(2.0, -1 / (self.fraction * (n + self.step_bias)))

    @override
    def decay_over(self, n: int, k: int) -> float:
        steps = range(n - k + 1, n + 1)
        return math.pow(
            2.0, -math.fsum(1 / (step + self.step_bias) for step in steps) / self.fraction
        )


@dataclass(frozen=True)
class InverseGamma(Schedule):
    """A decay that approaches 1 like an inverse power of the number of steps.

    ``d = 1 - (1 + n / inv_gamma) ** -power``, held between ``min_decay`` and ``decay``. It came with
    k-diffusion (``EMAWarmup``); ema-pytorch, diffusers and timm have it. With ``power=1`` it is
    ``n / (inv_gamma + n)``, the warm-up of mmengine.

    Args:
        inv_gamma: The number of steps on which the decay grows, more than 0.
        power: The exponent, more than 0: 2/3 for runs of a million steps (0.999 after 31,600
            steps), 3/4 for shorter ones (after 10,000).
        min_decay: The smallest decay.
        decay: The largest decay, not less than ``min_decay``.

    Example:
        >>> round(InverseGamma(power=3 / 4)(10_000), 3)
        0.999
    """

    inv_gamma: float = 1.0
    power: float = 2 / 3
    min_decay: float = 0.0
    decay: float = 0.9999

    @override
    def decay_at(self, n: int) -> float:
        grown = -math.expm1(-self.power * math.log1p(n / self.inv_gamma))
        return max(self.min_decay, min(self.decay, grown))


@dataclass(frozen=True)
class CountWarmup(Schedule):
    """The warm-up of TensorFlow: ``d = min(decay, (1 + n) / (offset + n))``, but at least ``min_decay``.

    torch_ema and diffusers have it too (there it is always on), d2go with another offset.

    Args:
        decay: The largest decay. 0.999 is reached after 9,000 steps, 0.9999 after 90,000.
        offset: The larger, the slower; 1 or more.
        min_decay: The smallest decay, not more than ``decay``.

    Example:
        >>> CountWarmup(0.999)(8) == 0.5
        True
    """

    decay: float = 0.999
    offset: float = 10.0
    min_decay: float = 0.0

    @override
    def decay_at(self, n: int) -> float:
        return max(self.min_decay, min(self.decay, (1 + n) / (self.offset + n)))


@dataclass(frozen=True)
class LinearRamp(Schedule):
    """A decay that rises along a straight line, and then stays.

    ``d = start + (decay - start) * min(1, n / steps)``.

    Args:
        decay: The decay at the end of the ramp.
        steps: The length of the ramp, more than 0.
        start: Where the line begins, at step 0.

    Example:
        >>> ramp = LinearRamp(decay=0.9, steps=100, start=0.5)
        >>> round(ramp(50), 12), ramp(1000)
        (0.7, 0.9)
    """

    decay: float = 0.999
    steps: int = 1000
    start: float = 0.0

    @override
    def decay_at(self, n: int) -> float:
        if n >= self.steps:
            return self.decay
        return self.start + (self.decay - self.start) * (n / self.steps)


@dataclass(frozen=True)
class ExponentialRamp(Schedule):
    """A decay that rises fast at first: ``d = decay * (1 - exp(-n / tau))``, as in Ultralytics.

    Args:
        decay: The decay that it approaches.
        tau: The number of steps after which 63 percent of it are reached, more than 0.

    Example:
        >>> round(ExponentialRamp(decay=0.9999, tau=2000)(2000), 3)
        0.632
    """

    decay: float = 0.9999
    tau: float = 2000.0

    @override
    def decay_at(self, n: int) -> float:
        return -self.decay * math.expm1(-n / self.tau)


@dataclass(frozen=True)
class Equal(Schedule):
    """The plain mean of all models that the average has seen: SWA, ``d = n / (n + 1)``.

    What counts is the models, not the steps between them: ``over(n, k)`` is ``n / (n + k)``, so with
    an update at every ``k``-th step the mean is that of the copy and of the models at the steps
    ``k``, ``2k``, ``3k`` and so on, each with the same weight.

    Example:
        >>> Equal()(3), Equal().over(30, 10)
        (0.75, 0.75)
    """

    @override
    def decay_at(self, n: int) -> float:
        return n / (n + 1)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return n / (n + k)


@dataclass(frozen=True)
class Power(Schedule):
    """An average that always spans the same part of the run, from Karras et al. 2024 (EDM2).

    The model of training step ``t`` has a weight in proportion to ``t ** gamma``. The width of that
    profile, its standard deviation divided by the length of the run, is ``sigma_rel``: 0.05 and 0.1
    are usual. ``d = (1 - 1 / t) ** (gamma + 1)`` with ``t = n + 1``, since the copy is the first of the
    models; ``k`` steps together have ``(1 - k / t) ** (gamma + 1)``. Post-hoc averages are made of
    these, see ``modkit.averaging.posthoc``.

    Args:
        sigma_rel: The relative width, more than 0 and less than 0.2886, that of the equal average.
        gamma: The exponent instead of the width, 0 or more.

    Raises:
        TypeError: Both are given, or neither.

    Example:
        >>> tenth = Power(sigma_rel=0.1)
        >>> round(tenth.exponent, 2), round(tenth(9), 3)
        (6.94, 0.433)
    """

    sigma_rel: float | None = None
    gamma: float | None = None
    exponent: float = dataclasses.field(init=False, repr=False, compare=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sigma_rel is None) == (self.gamma is None):
            raise TypeError("Power: give either sigma_rel or gamma")
        gamma = gamma_of(self.sigma_rel) if self.sigma_rel is not None else self.gamma
        object.__setattr__(self, "exponent", gamma)

    @override
    def decay_at(self, n: int) -> float:
        return math.pow(n / (n + 1), self.exponent + 1)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return math.pow((n + 1 - k) / (n + 1), self.exponent + 1)


@dataclass(frozen=True)
class Custom(Schedule):
    """A function of the number of the step.

    Args:
        function: Maps ``n``, 1 or more, to a decay from 0 to 1. It must be a function of ``n`` alone: the
            average asks it about steps in any order. A checkpoint does not hold it.

    Example:
        >>> Custom(lambda n: 1 - 1 / (n + 1) ** 0.5)(3)
        0.5
    """

    function: Callable[[int], float]

    @override
    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom: function must be callable, got {self.function!r}")

    @override
    def decay_at(self, n: int) -> float:
        decay = float(self.function(n))
        if not 0 <= decay <= 1:
            raise ValueError(f"Custom: {self.function!r} gave {decay} for step {n}, not 0 to 1")
        return decay

    @override
    def to_config(self) -> Config:
        return {"name": "Custom"}


_NAMED: dict[str, type[Schedule]] = {
    kind.__name__: kind
    for kind in (
        BEMA,
        Constant,
        CountWarmup,
        Equal,
        ExponentialRamp,
        HalfLife,
        HalfLifeFraction,
        InverseGamma,
        LinearRamp,
        Power,
        Window,
    )
}


def from_config(config: Mapping[str, Any]) -> Schedule:
    """Return the schedule that :meth:`Schedule.to_config` described.

    Args:
        config: The name of a class of this module under ``"name"``, and its numbers.

    Raises:
        ValueError: The name is none of this module's, or it is that of a function of your own, which a
            checkpoint cannot hold.
        TypeError: The numbers are not those of that class.

    Example:
        >>> from_config({"name": "Power", "sigma_rel": 0.1})
        Power(sigma_rel=0.1, gamma=None)
    """
    fields = dict(config)
    name = fields.pop("name", None)
    if name not in _NAMED:
        known = ", ".join(_NAMED)
        raise ValueError(f"no schedule to make from {config!r}: the name must be one of {known}")
    try:
        return _NAMED[name](**fields)
    except TypeError as error:
        raise TypeError(f"{name} cannot be made from {config!r}: {error}") from error


def as_schedule(decay: float | Callable[[int], float]) -> Schedule:
    """Return a schedule for a constant decay, a schedule or a function of the number of the step.

    Example:
        >>> as_schedule(0.99)
        Constant(decay=0.99)
    """
    if isinstance(decay, Schedule):
        return decay
    return Custom(decay) if callable(decay) else Constant(decay)


def profile(decay: float | Callable[[int], float], n: int, update_every: int = 1) -> list[float]:
    """Return the weight that the model of each update has in the average, the copy first.

    Args:
        decay: A constant decay, a schedule or a function.
        n: Number of steps since the copy.
        update_every: The average is updated at every step whose number this divides.

    Returns:
        One number for the copy and one for each update up to step ``n``; their sum is 1. The
        correction of :class:`BEMA` may make that of the copy negative.

    Example:
        >>> profile(Equal(), 3)
        [0.25, 0.25, 0.25, 0.25]
        >>> profile(0.5, 4, update_every=2)
        [0.0625, 0.1875, 0.75]
        >>> profile(Window(2), 3)
        [0.0, 0.0, 0.5, 0.5]
    """
    schedule = as_schedule(decay)
    if isinstance(schedule, Window):
        count = n // update_every + 1
        kept = min(count, schedule.window)
        return [0.0] * (count - kept) + [1 / kept] * kept
    weights = list(reversed(list(_weights_backwards(schedule, n, update_every))))
    if isinstance(schedule, BEMA):
        corrected = schedule.correction(n - n % update_every)
        weights[0] -= corrected
        weights[-1] += corrected
    return weights


def _weights_backwards(schedule: Schedule, n: int, update_every: int) -> Iterator[float]:
    """Yield the weights from the last update to the copy."""
    kept = 1.0
    for step in range(n - n % update_every, 0, -update_every):
        decay = schedule.over(step, update_every)
        yield kept * (1 - decay)
        kept *= decay
    yield kept
