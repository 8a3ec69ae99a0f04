"""What the schedules of the decay share, and the widths of power functions."""

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


Config: TypeAlias = dict[str, str | int | float]

# The relative width of the equal average, the widest that a power function reaches.
WIDEST_SIGMA_REL = 1 / math.sqrt(12)

Demand: TypeAlias = tuple[Callable[[float], bool], str]
_FRACTION: Demand = (lambda value: 0 <= value <= 1, "between 0 and 1")
_POSITIVE: Demand = (lambda value: value > 0, "more than 0")
_NOT_NEGATIVE: Demand = (lambda value: value >= 0, "0 or more")
# What the constructors demand of a field: the same name means the same thing in every class.
_DEMANDS: dict[str, Demand] = {
    "decay": _FRACTION,
    "min_decay": _FRACTION,
    "start": _FRACTION,
    "half_life": _POSITIVE,
    "fraction": _POSITIVE,
    "inv_gamma": _POSITIVE,
    "power": _POSITIVE,
    "steps": _POSITIVE,
    "tau": _POSITIVE,
    "step_bias": _NOT_NEGATIVE,
    "gamma": _NOT_NEGATIVE,
    "offset": (lambda value: value >= 1, "1 or more"),
    "ema_power": _NOT_NEGATIVE,
    "bias_power": _NOT_NEGATIVE,
    "multiplier": _NOT_NEGATIVE,
    "lag": _POSITIVE,
    "min_ema_multiplier": _FRACTION,
    "window": (lambda value: value >= 1 and value == int(value), "a whole number, 1 or more"),
    "sigma_rel": (lambda value: 0 < value < WIDEST_SIGMA_REL, "above 0 and below 0.2886"),
}


@dataclass(frozen=True)
class Schedule(ABC):
    """What all schedules share; a subclass gives the decay of one step, :meth:`decay_at`.

    A subclass of your own that is a frozen dataclass with numbers as fields can be used wherever a
    schedule is taken. :func:`from_config` knows the classes of this module only.
    """

    def __post_init__(self) -> None:
        """Turn the fields into plain Python numbers and refuse those that make no sense."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name, None)
            if field.name in _DEMANDS and value is not None:
                number = _checked(type(self).__name__, field.name, value)
                object.__setattr__(self, field.name, number)
        low, high = (getattr(self, name, None) for name in ("min_decay", "decay"))
        if low is not None and high is not None and low > high:
            kind = type(self).__name__
            raise ValueError(f"{kind}: min_decay must not exceed decay={high}, got {low}")

    @abstractmethod
    def decay_at(self, n: int) -> float:
        """Return the decay of step ``n``, which is 1 or more."""

    def decay_over(self, n: int, k: int) -> float:
        """Return the decay of ``k`` steps together, for ``1 <= k <= n``."""
        return math.prod(self.decay_at(step) for step in range(n - k + 1, n + 1))

    def __call__(self, n: int) -> float:
        """Return the decay of the step with number ``n``; 0 for the copy, ``n = 0``, and before."""
        return self.decay_at(n) if n > 0 else 0.0

    def over(self, n: int, k: int) -> float:
        """Return the decay that ``k`` steps have together, the last of which is step ``n``.

        An average that is updated at every ``k``-th step only takes this decay, and then forgets
        as fast as one that is updated at every step.

        Args:
            n: Number of the last of the steps.
            k: How many steps.

        Returns:
            The product of the decays of the steps ``n - k + 1`` to ``n``; 0 if the copy is one of
            them.

        Raises:
            ValueError: ``k`` is less than 1.

        Example:
            >>> from modkit.schedules import Constant
            >>> Constant(0.99).over(20, 10) == 0.99**10
            True
        """
        if k < 1:
            raise ValueError(f"{type(self).__name__}: k must be 1 or more, got {k}")
        return self.decay_over(n, k) if n >= k else 0.0

    def to_config(self) -> Config:
        """Return the name of the class and its numbers: what a checkpoint keeps.

        Example:
            >>> from modkit.schedules import HalfLife
            >>> HalfLife(1000).to_config()
            {'name': 'HalfLife', 'half_life': 1000.0}
        """
        fields = dataclasses.fields(self)
        numbers_ = {field.name: getattr(self, field.name) for field in fields if field.init}
        given = {name: value for name, value in numbers_.items() if value is not None}
        return {"name": type(self).__name__, **given}


def _checked(owner: str, name: str, value: object) -> float | int:
    """Return the value as a plain Python number; raise where it is none, or not one that is allowed."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
    number: int | float = float(value)
    if isinstance(value, numbers.Integral) and name in {"steps", "window"}:
        number = int(value)
    allows, wanted = _DEMANDS[name]
    if not (math.isfinite(number) and allows(number)):
        raise ValueError(f"{owner}: {name} must be {wanted}, got {value!r}")
    return number


def gamma_of(sigma_rel: float) -> float:
    """Return the exponent of the power function whose relative width is ``sigma_rel``.

    It is the one positive root of ``x**3 + 7 * x**2 + (16 - s) * x + 12 - s`` with ``s = sigma_rel ** -2``.

    Raises:
        ValueError: The width is not above 0 and below 0.2886, that of the equal average.

    Example:
        >>> round(gamma_of(0.05), 2)
        16.97
    """
    if not 0 < sigma_rel < WIDEST_SIGMA_REL:
        raise ValueError(f"sigma_rel must be above 0 and below 0.2886, got {sigma_rel!r}")
    inverse_square = sigma_rel**-2
    # 1 / sigma_rel lies above the root, and the cubic is convex there: Newton's steps only go down.
    gamma, below = math.inf, 1 / sigma_rel
    while below < gamma:
        gamma = below
        value = ((gamma + 7) * gamma + 16 - inverse_square) * gamma + 12 - inverse_square
        slope = (3 * gamma + 14) * gamma + 16 - inverse_square
        below = gamma - value / slope
    return max(gamma, 0.0)


def sigma_rel_of(gamma: float) -> float:
    """Return the relative width of the power function with this exponent, 0 or more.

    Example:
        >>> round(sigma_rel_of(6.94), 3)
        0.1
    """
    if not gamma >= 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma!r}")
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)
