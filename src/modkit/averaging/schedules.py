"""Decay schedules: the decay of each averaging step as a function of its number.

Everything in ``__all__`` is public as :mod:`modkit.schedules`, whose docstring defines ``n``.
"""

import math
import numbers
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

from typing_extensions import override

from modkit._messages import install_extra
from modkit._namespace import publish


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Constant",
    "CountWarmup",
    "Custom",
    "Equal",
    "HalfLife",
    "InverseGamma",
    "PerUpdate",
    "Power",
    "Schedule",
    "as_schedule",
    "bounds",
    "from_config",
    "gamma_of",
    "plot",
    "profile",
    "sigma_rel_of",
]

Decay: TypeAlias = float | Callable[[int], float]
Decays: TypeAlias = float | Sequence[Decay] | None

_DEFAULT_DECAY: Final = 0.999
# Below it a decay is more likely a momentum, which is one minus the decay.
_LEAST_PLAUSIBLE: Final = 0.1

# The relative width of the equal average, the limit for power functions.
_WIDEST: Final = 1 / math.sqrt(12)

_LIMITS: Final[dict[str, tuple[str, Callable[[Any, float], bool]]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def bounds(**limits: float) -> dict[str, Any]:
    """Return metadata that limits a dataclass field: ``at_least``, ``above``, ``at_most``, ``below``."""
    return {"bounds": [(*_LIMITS[name], limit) for name, limit in limits.items()]}


_FRACTION: Final = bounds(at_least=0, at_most=1)
_POSITIVE: Final = bounds(above=0)


def _checked(owner: str, declared: "Field[Any]", value: Any) -> Any:
    """Return a valid value of a field, a number as a plain ``int`` or ``float``."""
    limits = declared.metadata.get("bounds", [])
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        if limits and not (value is None and declared.default is None):
            raise TypeError(f"{owner}: {declared.name} must be a number, got {value!r}")
        return value
    if not math.isfinite(value) or not all(allows(value, limit) for _, allows, limit in limits):
        text = " and ".join(f"{words} {limit:g}" for words, _, limit in limits)
        wanted = text or "a finite number"
        raise ValueError(f"{owner}: {declared.name} must be {wanted}, got {value!r}")
    if isinstance(value, numbers.Integral) and not limits:
        return int(value)
    return float(value)


@dataclass(frozen=True)
class Schedule(ABC):
    """Base class of schedules; a subclass is a frozen dataclass that implements :meth:`decay_at`.

    Fields that are numbers must be finite, and :func:`bounds` limits them further. To resume an
    average, create it with an equal schedule: :func:`from_config` knows modkit's own classes only.
    """

    def __post_init__(self) -> None:
        """Validate the fields and convert numbers to plain Python numbers."""
        for declared in fields(self):
            if declared.init:
                value = _checked(type(self).__name__, declared, getattr(self, declared.name))
                object.__setattr__(self, declared.name, value)

    @abstractmethod
    def decay_at(self, n: int) -> float:
        """Return the decay of step ``n``, which is 1 or more."""

    def decay_over(self, n: int, k: int) -> float:
        """Return the decay of ``k`` steps together, for ``1 <= k <= n``."""
        return math.prod(self(step) for step in range(n - k + 1, n + 1))

    def __call__(self, n: int) -> float:
        """Return the decay of step ``n``, which must be from 0 to 1; 0 for the copy and before."""
        decay = self.decay_at(n) if n > 0 else 0.0
        return float(decay) if 0.0 <= decay <= 1.0 else self._refuse(decay, n)

    def _refuse(self, decay: float, n: int) -> NoReturn:
        raise ValueError(f"{self}: the decay of step {n} must be between 0 and 1, got {decay!r}")

    def over(self, n: int, k: int) -> float:
        """Return the decay of an update after ``k`` steps, 1 or more; 0 with the copy."""
        if k < 1:
            raise ValueError(f"{type(self).__name__}: k must be 1 or more, got {k}")
        decay = self.decay_over(n, k) if n >= k else 0.0
        return float(decay) if 0.0 <= decay <= 1.0 else self._refuse(decay, n)

    def to_config(self) -> dict[str, Any]:
        """Return the name of the class and its fields, as a checkpoint stores them."""
        config: dict[str, Any] = {"name": type(self).__name__}
        for declared in fields(self):
            value = getattr(self, declared.name)
            if declared.init and value is not None:
                config[declared.name] = value.to_config() if isinstance(value, Schedule) else value
        return config


class _ClosedForm(Schedule):
    """A schedule with a formula for ``k`` steps together, of which ``k = 1`` is a special case."""

    @override
    def decay_at(self, n: int) -> float:
        return self.decay_over(n, 1)


class _Clamped(Schedule):
    """A growing decay, clamped to the fields ``min_decay`` and ``decay``."""

    min_decay: float
    decay: float

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_decay > self.decay:
            text = f"min_decay must not exceed decay={self.decay}, got {self.min_decay}"
            raise ValueError(f"{type(self).__name__}: {text}")

    def _clamped(self, decay: float) -> float:
        return max(self.min_decay, min(self.decay, decay))


@dataclass(frozen=True)
class Constant(_ClosedForm):
    """A constant decay, 0 to 1; the average spans about ``1 / (1 - decay)`` steps."""

    decay: float = field(default=0.999, metadata=_FRACTION)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return self.decay**k


@dataclass(frozen=True)
class HalfLife(_ClosedForm):
    """A decay that halves a weight in ``half_life`` steps: ``d = 2 ** (-1 / half_life)``."""

    half_life: float = field(metadata=_POSITIVE)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return math.pow(2.0, -k / self.half_life)


@dataclass(frozen=True)
class InverseGamma(_Clamped):
    """A decay that approaches 1 by an inverse power: ``d = 1 - (1 + n / inv_gamma) ** -power``.

    It is clamped to ``min_decay`` and ``decay``, as in k-diffusion. Use a power of 2/3 for runs of a
    million steps, 3/4 for shorter ones.
    """

    inv_gamma: float = field(default=1.0, metadata=_POSITIVE)
    power: float = field(default=2 / 3, metadata=_POSITIVE)
    min_decay: float = field(default=0.0, metadata=_FRACTION)
    decay: float = field(default=0.9999, metadata=_FRACTION)

    @override
    def decay_at(self, n: int) -> float:
        return self._clamped(-math.expm1(-self.power * math.log1p(n / self.inv_gamma)))


@dataclass(frozen=True)
class CountWarmup(_Clamped):
    """TensorFlow's warm-up, also in torch_ema, diffusers and d2go: ``d = (1 + n) / (offset + n)``.

    It is clamped to ``min_decay`` and ``decay``; 0.999 is reached after 9,000 steps.
    """

    decay: float = field(default=0.999, metadata=_FRACTION)
    offset: float = field(default=10.0, metadata=bounds(at_least=1))
    min_decay: float = field(default=0.0, metadata=_FRACTION)

    @override
    def decay_at(self, n: int) -> float:
        return self._clamped((1 + n) / (self.offset + n))


@dataclass(frozen=True)
class Equal(_ClosedForm):
    """The mean of all models that the average has seen (SWA): ``d = n / (n + 1)``.

    ``over(n, k)`` is ``n / (n + k)``: the copy and the model of each update have the same weight.
    """

    @override
    def decay_over(self, n: int, k: int) -> float:
        return n / (n + k)


@dataclass(frozen=True)
class Power(_ClosedForm):
    """An average that spans a fixed part of the run, from Karras et al. 2024 (EDM2).

    The model of training step ``t`` has a weight proportional to ``t ** gamma``. Give ``gamma`` or
    ``sigma_rel``, the standard deviation of that profile divided by the length of the run: below
    0.288675, that of the equal average; 0.05 and 0.1 are usual.
    """

    sigma_rel: float | None = field(default=None, metadata=bounds(above=0, below=_WIDEST))
    gamma: float | None = field(default=None, metadata=bounds(at_least=0))
    exponent: float = field(init=False, repr=False, compare=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sigma_rel is None) == (self.gamma is None):
            raise TypeError("Power: give either sigma_rel or gamma")
        gamma = gamma_of(self.sigma_rel) if self.sigma_rel is not None else self.gamma
        object.__setattr__(self, "exponent", gamma)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return math.pow((n + 1 - k) / (n + 1), self.exponent + 1)


@dataclass(frozen=True)
class PerUpdate(_ClosedForm):
    """A schedule whose decay counts once per update, as in ema-pytorch, for any ``update_every``."""

    schedule: Decay

    @override
    def __post_init__(self) -> None:
        schedule = as_schedule(self.schedule, "PerUpdate: schedule")
        object.__setattr__(self, "schedule", schedule)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return as_schedule(self.schedule)(n)


@dataclass(frozen=True)
class Custom(Schedule):
    """A function of ``n``, 1 or more, to a decay; it is called with the steps in any order.

    It must depend on ``n`` only. A checkpoint does not contain it.
    """

    function: Callable[[int], float]

    @override
    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom: function must be callable, got {self.function!r}")
        if isinstance(self.function, type):
            raise TypeError(f"Custom: function must not be a class, got {self.function!r}")

    @override
    def decay_at(self, n: int) -> float:
        return float(self.function(n))

    @override
    def to_config(self) -> dict[str, Any]:
        return {"name": "Custom"}


def from_config(config: Mapping[str, Any]) -> Schedule:
    """Return the schedule that ``to_config()`` described; ValueError if it is not modkit's own."""
    given = dict(config)
    name = given.pop("name", None)
    # Only classes of this module: a checkpoint must not choose code to run.
    known = [one for one in __all__ if one[0].isupper() and one not in ("Schedule", "Custom")]
    if name not in known:
        names = ", ".join(known)
        raise ValueError(f"no schedule to make from {config!r}: the name must be one of {names}")
    if isinstance(given.get("schedule"), Mapping):
        given["schedule"] = from_config(given["schedule"])
    try:
        return cast("Schedule", globals()[name](**given))
    except TypeError as error:
        raise TypeError(f"{name} cannot be made from {config!r}: {error}") from error


def as_schedule(decay: Decay, name: str = "decay") -> Schedule:
    """Return the schedule of a constant decay, a schedule or a function of the step's number.

    Args:
        decay: One of the three.
        name: The argument, as a TypeError names it.
    """
    if isinstance(decay, Schedule):
        return decay
    if isinstance(decay, type):
        example = f"{decay.__name__}(...)"
        raise TypeError(f"{name} must be an instance, such as {example}, got the class {decay!r}")
    if callable(decay):
        return Custom(decay)
    if isinstance(decay, bool) or not isinstance(cast("object", decay), numbers.Real):
        wanted = "a number, a schedule or a function of the step"
        raise TypeError(f"{name} must be {wanted}, got {decay!r}")
    return Constant(decay)


def as_list(decays: Decay | Sequence[Decay]) -> Sequence[Decay]:
    """Return several decays, or one in a list. A string is one, and no schedule."""
    if isinstance(decays, Sequence) and not isinstance(decays, (str, bytes)):
        return decays
    return [cast("Decay", decays)]


def schedules_of(decay: Decays, schedule: Decay | Sequence[Decay] | None) -> list[Schedule]:
    """Return one schedule for each average that is asked for."""
    if schedule is not None and decay is not None:
        raise ValueError(f"EMA: give decay or schedule, not both: got {decay!r} and {schedule!r}")
    name, chosen = ("decay", decay) if schedule is None else ("schedule", schedule)
    if chosen is None:
        chosen = _DEFAULT_DECAY
    several = as_list(chosen)
    if not several:
        raise ValueError(f"EMA: {name} must not be an empty list")
    for one in several:
        if isinstance(one, (int, float)) and 0 < one < _LEAST_PLAUSIBLE:
            warnings.warn(
                f"EMA: decay={one} keeps {one:.2%} of the average in each update. If that is a momentum, "
                f"pass decay={1 - one:g}.",
                stacklevel=3,
            )
    return [as_schedule(one, f"EMA: {name}") for one in several]


def is_constant(schedule: Schedule) -> bool:
    """Return True if the decay does not depend on the number of the step; unknown classes may."""
    if isinstance(schedule, PerUpdate):
        return is_constant(as_schedule(schedule.schedule))
    return isinstance(schedule, (Constant, HalfLife))


def profile(decay: Decay, n: int, update_every: int = 1) -> list[float]:
    """Return the weight of each update's model in the average after ``n`` steps, the copy first.

    ``profile(0.5, 2)`` is ``[0.25, 0.25, 0.5]``. The sum is 1.
    """
    schedule, last = as_schedule(decay, "profile: decay"), n - n % update_every
    # From the last update to the copy: how much of the average is older than each update.
    decays = [schedule.over(step, update_every) for step in range(last, 0, -update_every)]
    older = [1.0, *accumulate(decays, operator.mul)]
    return [older[-1], *(new - old for old, new in pairwise(reversed(older)))]


def plot(
    schedules: "Decay | Sequence[Decay] | Mapping[str, Decay]",
    n: int,
    update_every: int = 1,
    *,
    axes: "Axes | None" = None,
) -> "Figure":
    """Plot the :func:`profile` of schedules, relative to the equal average (extra ``plot``).

    Long runs are drawn in about a thousand points. A dict of schedules gives the labels.
    """
    if min(n, update_every) < 1:
        raise ValueError(f"plot: n and update_every must be 1 or more, got {n} and {update_every}")
    if not isinstance(schedules, Mapping):
        several = as_list(schedules)
        schedules = {str(as_schedule(one, "plot: schedules")): one for one in several}
    if axes is None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(f"plot: matplotlib is needed. {install_extra('plot')}") from error
        axes = Figure(layout="constrained").subplots()
    for label, schedule in schedules.items():
        weights = profile(schedule, n, update_every)
        # The copy is a point of its own.
        edges = [0, *range(1, len(weights), max(1, len(weights) // 1000)), len(weights)]
        heights = [fmean(weights[a:b]) * len(weights) for a, b in pairwise(edges)]
        steps = [(edge - 1) * update_every for edge in edges[1:]]
        axes.plot(steps, heights, label=label, drawstyle="steps-mid")
    axes.set(xlabel="step", ylabel="weight, relative to the equal average", yscale="log")
    axes.legend()
    return cast("Figure", axes.figure)


def gamma_of(sigma_rel: float) -> float:
    """Return the exponent of the power function with the relative width ``sigma_rel``."""
    if not 0 < sigma_rel < _WIDEST:
        raise ValueError(f"sigma_rel must be above 0 and below 0.2886, got {sigma_rel!r}")
    # 1 / sigma_rel is above the root, where the cubic is convex: Newton's steps only decrease.
    s = sigma_rel**-2
    gamma, below = math.inf, 1 / sigma_rel
    while below < gamma:
        gamma = below
        value = ((gamma + 7) * gamma + 16 - s) * gamma + 12 - s
        below = gamma - value / ((3 * gamma + 14) * gamma + 16 - s)
    return max(gamma, 0.0)


def sigma_rel_of(gamma: float) -> float:
    """Return the relative width of the power function with this exponent, 0 or more."""
    if not gamma >= 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma!r}")
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


publish("modkit.schedules", *(globals()[_name] for _name in __all__))
