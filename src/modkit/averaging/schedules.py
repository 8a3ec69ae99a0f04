"""Decay schedules: the decay of each averaging step as a function of its number.

Everything in ``__all__`` is public as :mod:`modkit.schedules`, whose docstring defines ``n``.
"""

import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn, TypeAlias, TypeGuard, cast

import torch
from typing_extensions import override

from modkit._messages import warn_user
from modkit._namespace import publish


__all__ = [
    "Constant",
    "CountWarmup",
    "Custom",
    "Equal",
    "InverseGamma",
    "PerUpdate",
    "Power",
    "Schedule",
    "as_schedule",
    "from_config",
    "gamma_of",
    "profile",
    "sigma_rel_of",
]

Decay: TypeAlias = float | Callable[[int], float]
Decays: TypeAlias = float | Sequence[Decay] | None

# The schedules that ``from_config`` makes: a checkpoint does not describe functions.
_CLASSES: Final = [
    name for name in __all__ if name[0].isupper() and name not in {"Schedule", "Custom"}
]
# Below it a decay is more likely a momentum, which is one minus the decay.
_LEAST_PLAUSIBLE: Final = 0.1

# The relative width of the equal average, the limit for power functions: the standard deviation of
# the uniform distribution on [0, 1].
_WIDEST: Final = 1 / math.sqrt(12)

# Which numbers a field of a schedule accepts, in words and as a function.
_Limits: TypeAlias = dict[str, tuple[str, Callable[[float], bool]]]
_FRACTION: Final[_Limits] = {"limits": ("from 0 to 1", lambda x: 0 <= x <= 1)}
_POSITIVE: Final[_Limits] = {"limits": ("above 0", lambda x: x > 0)}
_AT_LEAST_ONE: Final[_Limits] = {"limits": ("1 or more", lambda x: x >= 1)}
_WIDTH: Final[_Limits] = {"limits": ("above 0 and below 0.2886", lambda x: 0 < x < _WIDEST)}


@dataclass(frozen=True)
class Schedule(ABC):
    """Base class of schedules; a subclass is a frozen dataclass that implements :meth:`decay_at`.

    Numbers in fields become plain Python numbers, so that checkpoints can hold them. To resume an
    average, create it with an equal schedule: :func:`from_config` knows modkit's own classes only.

    Example:
        >>> from dataclasses import dataclass
        >>> from modkit import schedules
        >>> @dataclass(frozen=True)
        ... class Linear(schedules.Schedule):
        ...     steps: float
        ...
        ...     def decay_at(self, n):
        ...         return min(0.999, n / self.steps)
        >>> Linear(steps=1000)(250)
        0.25
    """

    def __post_init__(self) -> None:
        """Validate the fields and convert numbers to plain Python numbers.

        Raises:
            TypeError: If a field with limits is not a number.
            ValueError: If a number is not within its limits.
        """
        for declared in fields(self):
            problem = f"{type(self).__name__}: {declared.name} must be"
            value = getattr(self, declared.name)
            limits = declared.metadata.get("limits")
            is_number: bool = type(value) is not bool and isinstance(value, numbers.Real)
            if limits and not is_number:
                raise TypeError(f"{problem} a number, got {value!r}")
            if limits and not limits[1](value):
                raise ValueError(f"{problem} {limits[0]}, got {value!r}")
            if is_number:
                # NumPy's numbers would make a state that ``weights_only=True`` refuses to load.
                plain: Any = int if isinstance(value, numbers.Integral) and not limits else float
                object.__setattr__(self, declared.name, plain(value))

    @abstractmethod
    def decay_at(self, n: int) -> float:
        """Return the decay of a step. A subclass implements it; users call the schedule itself.

        Args:
            n: Number of the step, 1 or more (see :mod:`modkit.schedules`).

        Returns:
            The decay, which the caller tests: it must be from 0 to 1.
        """

    def decay_over(self, n: int, k: int) -> float:
        """Return the decay of ``k`` steps together: the product of their decays.

        A subclass may implement it by a formula. Users call :meth:`over`.

        Args:
            n: Number of the last of the steps.
            k: Number of steps, from 1 to ``n``.

        Returns:
            The decay, which the caller tests: it must be from 0 to 1.
        """
        return math.prod(self(step) for step in range(n - k + 1, n + 1))

    def __call__(self, n: int) -> float:
        """Return the decay of a step.

        Args:
            n: Number of the step (see :mod:`modkit.schedules`).

        Returns:
            The decay, from 0 to 1; 0 for the copy (``n = 0``) and before it.

        Raises:
            ValueError: If :meth:`decay_at` returns a number that is not from 0 to 1.
        """
        decay = self.decay_at(n) if n > 0 else 0.0
        return float(decay) if 0.0 <= decay <= 1.0 else self._refuse(decay, n)

    def _refuse(self, decay: float, n: int) -> NoReturn:
        raise ValueError(f"{self}: the decay of step {n} must be between 0 and 1, got {decay!r}")

    def over(self, n: int, k: int) -> float:
        """Return the decay of an update every ``k`` steps, as with ``update_every=k``.

        The average spans as many steps as one that is updated in every step, except with
        :class:`PerUpdate`; :class:`Equal` gives each averaged model the same weight.

        Args:
            n: Number of the step at which the average is updated (see :mod:`modkit.schedules`).
            k: Number of steps since the last update, 1 or more.

        Returns:
            The decay, from 0 to 1; 0 if the copy (step 0) is among the ``k`` steps.

        Raises:
            ValueError: If ``k`` is below 1, or :meth:`decay_over` returns a number that is not from
                0 to 1.

        Example:
            >>> from modkit import schedules
            >>> schedules.Constant(0.9).over(100, 2) == 0.9**2
            True
        """
        if k < 1:
            raise ValueError(f"{type(self).__name__}: k must be 1 or more, got {k}")
        # Fewer steps than ``k`` since the copy: that is among them, and replaced what was before.
        decay = self.decay_over(n, k) if n >= k else 0.0
        return float(decay) if 0.0 <= decay <= 1.0 else self._refuse(decay, n)

    def to_config(self) -> dict[str, Any]:
        """Return the name of the class and its fields, as a checkpoint stores them.

        Returns:
            ``"name"`` and each field that is not None: numbers, and dicts for schedules.
        """
        config: dict[str, Any] = {"name": type(self).__name__}
        for declared in fields(self):
            value = getattr(self, declared.name)
            if value is not None:
                config[declared.name] = value.to_config() if isinstance(value, Schedule) else value
        return config


class _ClosedForm(Schedule):
    """A schedule with a formula for ``k`` steps together, of which ``k = 1`` is a special case."""

    @override
    def decay_at(self, n: int) -> float:
        return self.decay_over(n, 1)


@dataclass(frozen=True)
class Constant(_ClosedForm):
    """A constant decay: the usual exponential moving average, ``d = decay``.

    The average spans about ``1 / (1 - decay)`` steps. It is the formula of
    ``torch.optim.swa_utils.get_ema_multi_avg_fn``. A half-life of ``h`` steps is the decay ``0.5 **
    (1 / h)``.

    Args:
        decay: The decay of each step, from 0 to 1.

    Raises:
        TypeError: If ``decay`` is not a number.
        ValueError: If ``decay`` is not from 0 to 1.

    Example:
        >>> from modkit import schedules
        >>> schedules.Constant(0.9)(5)
        0.9
    """

    decay: float = field(default=0.999, metadata=_FRACTION)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return self.decay**k


@dataclass(frozen=True)
class InverseGamma(Schedule):
    """A decay that approaches 1 by an inverse power, ``d = 1 - (1 + n / inv_gamma) ** -power``.

    The decay is clamped to ``min_decay`` and ``decay``. It is the formula of ``EMAWarmup`` in
    k-diffusion (https://github.com/crowsonkb/k-diffusion/blob/master/k_diffusion/utils.py), also in
    ema-pytorch, diffusers and timm. Use a power of 2/3 for runs of a million steps (0.999 after
    31,600 steps), 3/4 for shorter ones (0.999 after 10,000 steps).

    Args:
        inv_gamma: Number of steps after which ``d`` is ``1 - 2 ** -power``, above 0; a larger one
            slows the growth.
        power: Exponent, above 0; a larger one speeds up the growth.
        min_decay: Smallest decay, from 0 to 1; it takes precedence over ``decay``.
        decay: Largest decay, from 0 to 1.

    Raises:
        TypeError: If a field is not a number.
        ValueError: If a field is out of range.

    Example:
        >>> from modkit import schedules
        >>> [round(schedules.InverseGamma()(n), 3) for n in (1, 10, 31_600, 10**7)]
        [0.37, 0.798, 0.999, 1.0]
    """

    inv_gamma: float = field(default=1.0, metadata=_POSITIVE)
    power: float = field(default=2 / 3, metadata=_POSITIVE)
    min_decay: float = field(default=0.0, metadata=_FRACTION)
    decay: float = field(default=0.9999, metadata=_FRACTION)

    @override
    def decay_at(self, n: int) -> float:
        # ``1 - (1 + x) ** -power`` without cancellation, for steps far beyond ``inv_gamma``.
        decay = -math.expm1(-self.power * math.log1p(n / self.inv_gamma))
        return max(self.min_decay, min(self.decay, decay))


@dataclass(frozen=True)
class CountWarmup(Schedule):
    """A warm-up by the number of steps, ``d = (1 + n) / (offset + n)``.

    The decay is clamped to ``min_decay`` and ``decay``. It is the formula of TensorFlow's
    ``tf.train.ExponentialMovingAverage(num_updates=)``
    (https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage), also in
    torch_ema, diffusers and d2go. With the default offset, which is TensorFlow's, 0.999 is reached
    after 9,000 steps, and 0.9999 after 90,000.

    Args:
        decay: Largest decay, from 0 to 1.
        offset: Number of steps plus 2 after which ``d`` is 0.5, 1 or more; a larger one slows the
            growth.
        min_decay: Smallest decay, from 0 to 1; it takes precedence over ``decay``.

    Raises:
        TypeError: If a field is not a number.
        ValueError: If a field is out of range.

    Example:
        >>> from modkit import schedules
        >>> [round(schedules.CountWarmup()(n), 3) for n in (1, 8, 1000, 9000)]
        [0.182, 0.5, 0.991, 0.999]
    """

    decay: float = field(default=0.999, metadata=_FRACTION)
    offset: float = field(default=10.0, metadata=_AT_LEAST_ONE)
    min_decay: float = field(default=0.0, metadata=_FRACTION)

    @override
    def decay_at(self, n: int) -> float:
        return max(self.min_decay, min(self.decay, (1 + n) / (self.offset + n)))


@dataclass(frozen=True)
class Equal(_ClosedForm):
    """The mean of all models that the average has seen, ``d = n / (n + 1)``.

    It is stochastic weight averaging (SWA, https://arxiv.org/abs/1803.05407). With
    ``update_every=k``, ``over(n, k)`` is ``n / (n + k)``: the copy and the model of each update
    have the same weight.

    Example:
        >>> from modkit import schedules
        >>> schedules.Equal()(1), schedules.profile(schedules.Equal(), 3)
        (0.5, [0.25, 0.25, 0.25, 0.25])
    """

    @override
    def decay_over(self, n: int, k: int) -> float:
        return n / (n + k)


@dataclass(frozen=True)
class Power(_ClosedForm):
    """An average that spans a fixed part of the run, ``d = (1 - 1 / (n + 1)) ** (gamma + 1)``.

    The model of training step ``t`` has a weight proportional to ``t ** gamma``, where ``t = n +
    1``, since the copy is the first model. The decay of ``k`` steps is ``(1 - k / t) ** (gamma +
    1)``: equation 127 of Karras et al. 2024, "Analyzing and Improving the Training Dynamics of
    Diffusion Models" (EDM2), https://arxiv.org/abs/2312.02696. ``gamma`` is :func:`gamma_of` the
    width; from a ``gamma``, :func:`sigma_rel_of` makes one.

    Args:
        sigma_rel: Standard deviation of the profile ``t ** gamma``, divided by the length of the
            run: above 0 and below 0.288675, that of the equal average. 0.05 and 0.1 are usual.

    Raises:
        TypeError: If ``sigma_rel`` is not a number.
        ValueError: If ``sigma_rel`` is out of range.

    Example:
        >>> from modkit import schedules
        >>> round(schedules.Power(sigma_rel=0.05)(1000), 4)
        0.9822
    """

    sigma_rel: float = field(metadata=_WIDTH)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return math.pow((n + 1 - k) / (n + 1), gamma_of(self.sigma_rel) + 1)


@dataclass(frozen=True)
class PerUpdate(_ClosedForm):
    """A schedule whose decay counts once per update, for any ``update_every``.

    With ``update_every=k``, the update at step ``n`` uses ``schedule(n)``, and not
    ``schedule.over(n, k)``: the average of every k-th model spans k times as many steps. This is
    what ema-pytorch does (``EMA(update_every=)``, https://github.com/lucidrains/ema-pytorch).

    Args:
        schedule: A schedule, a decay or a function of ``n``.

    Raises:
        TypeError: If ``schedule`` is something else, such as a class.

    Example:
        >>> from modkit import schedules
        >>> schedules.PerUpdate(0.9).over(100, 10)
        0.9
    """

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
    """A decay by a function of ``n``, which ``EMA(schedule=function)`` makes from the function.

    A checkpoint does not contain the function. To resume, create the ``EMA`` with an equal one.

    Args:
        function: Takes ``n``, 1 or more, and returns a decay from 0 to 1. It is called with the
            steps in any order, so it must depend on ``n`` only.

    Raises:
        TypeError: If ``function`` is not callable, or is a class.

    Example:
        >>> from modkit import schedules
        >>> schedules.Custom(lambda n: min(0.999, n / (n + 3)))(3)
        0.5
    """

    function: Callable[[int], float]

    @override
    def __post_init__(self) -> None:
        if not _is_function(self.function):
            raise TypeError(f"Custom: function must be a function of n, got {self.function!r}")

    @override
    def decay_at(self, n: int) -> float:
        return float(self.function(n))

    @override
    def to_config(self) -> dict[str, Any]:
        return {"name": "Custom"}


def from_config(config: Mapping[str, Any]) -> Schedule:
    """Return the schedule that :meth:`Schedule.to_config` described.

    Args:
        config: ``"name"``, the class, and its fields.

    Returns:
        A schedule equal to the one described.

    Raises:
        ValueError: If the class is not one of this module, or is :class:`Custom`, whose function is
            not in a checkpoint; also if a field is out of range.
        TypeError: If the fields are not those of the class, or one is not a number.

    Example:
        >>> from modkit import schedules
        >>> schedules.from_config(schedules.Power(0.05).to_config())
        Power(sigma_rel=0.05)
    """
    options = dict(config)
    name = options.pop("name", None)
    # Only classes of this module: a checkpoint must not choose code to run.
    if name not in _CLASSES:
        raise ValueError(
            f"no schedule to make from {config!r}: the name must be one of {', '.join(_CLASSES)}"
        )
    if isinstance(options.get("schedule"), Mapping):
        options["schedule"] = from_config(options["schedule"])

    return cast("Schedule", globals()[name](**options))


def as_schedule(decay: Decay, name: str = "decay") -> Schedule:
    """Return the schedule of a constant decay, a schedule or a function of the step's number.

    Args:
        decay: A decay from 0 to 1, a schedule, or a function of ``n``.
        name: The argument, as errors name it.

    Returns:
        The schedule itself, or a :class:`Constant` or :class:`Custom` one.

    Raises:
        TypeError: If ``decay`` is something else, such as a class.
        ValueError: If a constant decay is not from 0 to 1.

    Example:
        >>> from modkit import schedules
        >>> schedules.as_schedule(0.99)
        Constant(decay=0.99)
    """
    if isinstance(decay, Schedule):
        return decay
    if isinstance(cast("object", decay), numbers.Real) and not isinstance(decay, bool):
        return Constant(cast("float", decay))
    if _is_function(decay):
        return Custom(decay)
    is_model = isinstance(decay, torch.nn.Module)
    got = f"the model {type(decay).__name__} (see modkit.EMA)" if is_model else repr(decay)
    raise TypeError(
        f"{name} must be a number, a schedule or a function of the step, got {got}. Schedules are "
        f"instances of the classes in modkit.schedules: {', '.join(_CLASSES)}"
    )


def _is_function(value: object) -> TypeGuard[Callable[[int], float]]:
    """Return True for what may compute a decay: classes and models are callable too."""
    return callable(value) and not isinstance(value, (type, torch.nn.Module))


def schedules_of(decay: Decays, schedule: Decay | Sequence[Decay] | None) -> list[Schedule]:
    """Return one schedule for each average that these two arguments of ``EMA`` ask for."""
    if schedule is not None and decay is not None:
        raise ValueError(f"EMA: give decay or schedule, not both: got {decay!r} and {schedule!r}")
    name, chosen = ("decay", decay) if schedule is None else ("schedule", schedule)
    # A constant 0.999 would keep 37 % of the untrained model for 1,000 steps.
    chosen = CountWarmup(0.999) if chosen is None else chosen
    # A string counts as one, which is refused below.
    is_list = isinstance(chosen, Sequence) and not isinstance(chosen, (str, bytes))
    decays = cast("Sequence[Decay]", chosen if is_list else [chosen])
    if not decays:
        raise ValueError(f"EMA: {name} must not be an empty list")

    # 0.0 is plausible: an average that is the model itself, to compare with.
    for value in decays:
        if isinstance(value, (int, float)) and 0 < value < _LEAST_PLAUSIBLE:
            warn_user(
                f"EMA: decay={value} keeps {value:.2%} of the average in each update. If that is a "
                f"momentum, pass decay={1 - value:g}."
            )
    return [as_schedule(value, f"EMA: {name}") for value in decays]


def is_constant(schedule: Schedule) -> bool:
    """Return True if the decay does not depend on the number of the step; unknown classes may."""
    if isinstance(schedule, PerUpdate):
        return is_constant(as_schedule(schedule.schedule))
    return isinstance(schedule, Constant)


def profile(decay: Decay, n: int, update_every: int = 1) -> list[float]:
    """Return the weight of each update's model in the average, the copy first.

    Args:
        decay: A decay from 0 to 1, a schedule, or a function of ``n``.
        n: Number of steps since the copy, 0 or more (see :mod:`modkit.schedules`).
        update_every: Number of steps between updates, 1 or more.

    Returns:
        ``n // update_every + 1`` weights, from 0 to 1, because the copy is a model of the average
        too: after ``n`` steps with ``update_every=1`` it contains ``n + 1`` models. Their sum is 1.

    Raises:
        TypeError: If ``decay`` is not a number, a schedule or a function.
        ValueError: If ``n`` or ``update_every`` is too small, or a decay is not from 0 to 1.

    Example:
        >>> from modkit import schedules
        >>> schedules.profile(0.5, 2)
        [0.25, 0.25, 0.5]
    """
    schedule = as_schedule(decay, "profile: decay")
    if n < 0 or update_every < 1:
        raise ValueError(
            "profile: n must be 0 or more and update_every 1 or more, "
            f"got n={n} and update_every={update_every}"
        )

    # From the last update to the copy: how much of the average is older than each update.
    last = n - n % update_every
    decays = [schedule.over(step, update_every) for step in range(last, 0, -update_every)]
    older = [1.0, *accumulate(decays, operator.mul)]
    return [older[-1], *(new - old for old, new in pairwise(reversed(older)))]


def gamma_of(sigma_rel: float) -> float:
    """Return the exponent of the power function with a relative width.

    It is the inverse of :func:`sigma_rel_of`.

    It is the positive root of ``x**3 + 7 * x**2 + (16 - s) * x + 12 - s`` with ``s =
    sigma_rel**-2``: equation 126 and Algorithm 2 of https://arxiv.org/abs/2312.02696.

    Args:
        sigma_rel: Standard deviation of the profile ``t ** gamma``, divided by the length of the
            run: above 0 and below 0.2886.

    Returns:
        The exponent ``gamma``, 0 or more.

    Raises:
        ValueError: If ``sigma_rel`` is out of range.

    Example:
        >>> from modkit import schedules
        >>> round(schedules.gamma_of(0.1), 2)
        6.94
    """
    if not 0 < sigma_rel < _WIDEST:
        raise ValueError(f"sigma_rel must be above 0 and below 0.2886, got {sigma_rel!r}")

    # ``sigma_rel_of`` squared is (x + 1) / ((x + 2)**2 * (x + 3)), and so (x + 2)**2 * (x + 3) is s
    # * (x + 1). Expanded, that is the cubic below; 3, 14 and 16 are those of its derivative. It
    # makes s greater than (x + 2)**2, so 1 / sigma_rel is above the root, where the cubic is
    # convex: Newton's steps only decrease, and end where rounding stops them.
    s = sigma_rel**-2
    gamma = math.inf
    next_gamma = 1 / sigma_rel
    while next_gamma < gamma:
        gamma = next_gamma
        value = ((gamma + 7) * gamma + 16 - s) * gamma + 12 - s
        slope = (3 * gamma + 14) * gamma + 16 - s
        next_gamma = gamma - value / slope
    return max(gamma, 0.0)


def sigma_rel_of(gamma: float) -> float:
    """Return the relative width of the power function with an exponent.

    It is the inverse of :func:`gamma_of`.

    It is ``sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)``, the standard deviation of a density
    proportional to ``t ** gamma`` on [0, 1]: equation 123 of https://arxiv.org/abs/2312.02696.

    Args:
        gamma: Exponent of the profile ``t ** gamma``, 0 or more.

    Returns:
        The relative width, above 0 and at most 0.288675, which is ``1 / sqrt(12)``.

    Raises:
        ValueError: If ``gamma`` is below 0.

    Example:
        >>> from modkit import schedules
        >>> schedules.sigma_rel_of(1.0) == 1 / 18**0.5
        True
    """
    if not gamma >= 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma!r}")
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


publish("modkit.schedules", *(globals()[_name] for _name in __all__))
