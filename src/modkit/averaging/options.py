"""The options of averages, validated, and which tensors of a model they select."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, cast, get_args

import torch
from torch import Tensor

from modkit.averaging.named_tensors import Member, NamedTensors
from modkit.averaging.precision import PRECISIONS, OnNonfinite, Precision, is_averaged, kept_dtype
from modkit.averaging.schedules import Decay


# Globs of names (``"head.*"``), or a predicate.
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
BufferPolicy: TypeAlias = Literal["copy", "average", "ignore"]
# One policy for all buffers, or one for each glob of names; the first glob that matches counts.
Buffers: TypeAlias = BufferPolicy | Mapping[str, BufferPolicy]


Device: TypeAlias = int | str | torch.device | None


def check_choice(owner: str, name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if the value is not one of the choices."""
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"{owner}: {name} must be one of {expected}, got {value!r}")


def checked_count(name: str, value: int, least: int, owner: str = "EMA") -> int:
    """Return a number of steps, or raise TypeError or ValueError if it is not an int >= least."""
    if isinstance(cast("object", value), bool) or not isinstance(cast("object", value), int):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{owner}: {name} must be {least} or more, got {value}")
    return value


class CheckedCount:
    """An attribute that is an int of at least ``least``, validated each time that it is set."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> int:
        if instance is None:
            raise AttributeError(self.name)
        value: int = vars(instance)[self.name]
        return value

    def __set__(self, instance: object, value: int) -> None:
        vars(instance)[self.name] = checked_count(self.name, value, self.least)


class EMAOptions(TypedDict, total=False):
    """Options of :class:`EMA` that each callback takes as keywords.

    A callback passes them to the :class:`EMA` that it creates, which states the details, and raises
    the error of an invalid one in its constructor. All keys are optional. Updates are counted in
    optimizer steps, unless the callback is told to update less often.

    Attributes:
        schedule: Decay that changes, in place of ``decay``, or a list of them: a schedule of
            :mod:`modkit.schedules`, or a function of ``n``, the number of steps since the average
            was a copy of the model. Default: None, the constant ``decay``.
        update_after_step: Number of updates to ignore before the parameters are copied. Default: 0.
        update_every: Average once every ``update_every`` updates, with the decays of that many
            steps multiplied. Default: 1.
        precision: ``"fp32"``, ``"fp64"``, ``"same"`` as the parameter, ``"stochastic"`` or
            ``"compensated"``. Default: ``"fp32"``.
        device: Device of the averages. Default: None, that of each parameter.
        buffers: ``"copy"``, ``"average"`` or ``"ignore"`` for floating-point buffers, or a dict
            from globs of names to one of the three. Default: ``"copy"``.
        include: Globs of names, or a predicate: parameters to average. Default: None, all.
        exclude: Globs of names, or a predicate: parameters not to average. Default: None.
        trainable_only: Average only parameters that require gradients at the first update. Default:
            False.
        on_nonfinite: ``"ignore"`` averages infinite and NaN parameters, ``"skip"`` skips the step,
            ``"raise"`` raises RuntimeError. Default: ``"ignore"``.
        seed: Seed for stochastic rounding. Default: 0.

    Example:
        >>> from modkit import EMACallback, nn
        >>> from modkit.averaging.callback import EMAOptions
        >>> options: EMAOptions = {"update_every": 10, "exclude": "*.bias"}
        >>> ema = EMACallback(nn.Sequential(nn.Linear(1, 1)), decay=0.99, **options)
        >>> ema.ema.update_every
        10
    """

    schedule: Decay | Sequence[Decay] | None
    update_after_step: int
    update_every: int
    precision: Precision
    device: Device
    buffers: Buffers
    include: Names
    exclude: Names
    trainable_only: bool
    on_nonfinite: OnNonfinite
    seed: int


@dataclass(frozen=True)
class Options:
    """Options of an average, validated. See ``EMA``.

    ``dtype`` is that of ``EMA.to``. ``copy_rest`` copies parameters that are not averaged,
    ``integers`` averages integer parameters too, which truncates, and ``owner`` is the class that
    error messages name.
    """

    include: Names = None
    exclude: Names = None
    buffers: Buffers = "copy"
    trainable_only: bool = False
    precision: Precision = "fp32"
    device: torch.device | None = None
    on_nonfinite: OnNonfinite = "ignore"
    seed: int = 0
    dtype: torch.dtype | None = None
    copy_rest: bool = False
    integers: bool = False
    owner: str = "EMA"

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.buffers), (str, Mapping)):
            raise TypeError(
                f"{self.owner}: buffers must be a policy, or a dict from globs of names to "
                f"policies, got {self.buffers!r}"
            )
        policies = [self.buffers] if isinstance(self.buffers, str) else self.buffers.values()
        for policy in policies:
            check_choice(self.owner, "buffers", policy, get_args(BufferPolicy))
        check_choice(self.owner, "precision", self.precision, PRECISIONS)
        check_choice(self.owner, "on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        try:
            torch.Generator().manual_seed(self.seed)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            text = f"{self.owner}: seed must be an int of at most 64 bits, got {self.seed!r}"
            raise ValueError(text) from error
        for field in ("include", "exclude"):
            names = getattr(self, field)
            if names is not None and not isinstance(names, str) and not callable(names):
                # Globs may come from an iterator.
                globs = tuple(names) if isinstance(cast("object", names), Iterable) else (names,)
                if not all(isinstance(glob, str) for glob in globs):
                    raise TypeError(
                        f"{self.owner}: {field} must be globs of names or a predicate, got "
                        f"{names!r}"
                    )
                object.__setattr__(self, field, globs)

    def check_selection(self, model: torch.nn.Module, named: NamedTensors) -> None:
        """Raise ValueError if no parameter of a model is selected, or a glob matches no name.

        Args:
            model: The model.
            named: Its tensors.
        """
        if not named.parameters:
            raise ValueError(
                f"EMA: {type(model).__name__} has no parameters to average. Create the EMA when "
                "the model has its parameters; a quantized model keeps its weights elsewhere."
            )
        if not any(map(self.chooses, named.parameters.values())):
            raise ValueError(
                f"EMA: include={self.include!r}, exclude={self.exclude!r}, "
                f"trainable_only={self.trainable_only} select none of the {len(named.parameters)} "
                "parameters"
            )
        self.check_globs(model)

    def check_globs(self, model: torch.nn.Module) -> None:
        """Raise ValueError if a glob matches no name: it is a mistake that would have no effect.

        ``"*"`` is not one, and a lazy model does not have all of its tensors yet.
        """
        parameters = [("include", self.include), ("exclude", self.exclude)]
        globs = [(option, glob) for option, names in parameters for glob in _globs_of(names)]
        if isinstance(self.buffers, Mapping):
            globs += [("buffers", glob) for glob in self.buffers]
        named = NamedTensors(model) if globs else None
        if named is None or named.has_lazy():
            return

        def matched(option: str, glob: str) -> bool:
            buffers = (*named.buffers, *named.empty)
            known = buffers if option == "buffers" else named.parameters
            return glob == "*" or any(fnmatch.fnmatchcase(name, glob) for name in known)

        unused = [f"{option}={glob!r}" for option, glob in globs if not matched(option, glob)]
        if unused:
            names = [*named.parameters, *named.buffers]
            some = ", ".join(names[:8])
            tied = [f"; {alias} is tied to {name}" for alias, name in named.aliases.items()]
            raise ValueError(
                f"{self.owner}: no name of {type(model).__name__} matches {', '.join(unused)}. The "
                f"names of its {len(names)} tensors begin with {some}{''.join(tied[:4])}. Correct "
                "the globs, or leave them out."
            )

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the average of a tensor of ``dtype`` is kept."""
        own = self.dtype if dtype.is_floating_point else None
        return own or kept_dtype(dtype, self.precision)

    def check_width(self, what: str, dtype: torch.dtype, remedy: str) -> None:
        """Raise ValueError if averages cast to ``dtype`` have fewer bits than ``precision`` promises."""
        if self.precision not in ("fp32", "fp64"):
            return
        least = kept_dtype(dtype, self.precision)
        if least != dtype:
            raise ValueError(
                f"{what} {dtype}, but precision={self.precision!r} keeps averages in {least} or "
                "wider: in fewer bits updates are rounded away. For averages in bf16 or fp16 use "
                f"precision='stochastic' or 'compensated'. {remedy}"
            )

    def chooses(self, member: Member, known: Iterable[str] = ()) -> bool:
        """Return True if a parameter is averaged; one that is averaged already stays so."""
        name = member.name
        if self.include is not None and not _matches(self.include, name):
            return False
        trains = not self.trainable_only or member.tensor.requires_grad or name in known
        return trains and not _matches(self.exclude, name)

    def _policy(self, member: Member, known: Iterable[str]) -> BufferPolicy:
        has_average = is_averaged(member.tensor)
        if member.is_parameter:
            if not self.chooses(member, known):
                return "copy" if self.copy_rest else "ignore"
            return "average" if has_average or self.integers else "copy"
        if isinstance(self.buffers, str):
            return self.buffers if has_average else "copy"
        for glob, policy in self.buffers.items():
            if fnmatch.fnmatchcase(member.name, glob):
                return "copy" if policy == "average" and not has_average else policy
        return "copy"

    def split(
        self, model: NamedTensors, known: Iterable[str] = ()
    ) -> tuple[dict[str, Tensor], list[Member]]:
        """Return the tensors to average by name, and those to copy; ``known`` are averaged already."""
        averaged: dict[str, Tensor] = {}
        copied: list[Member] = []
        for name, member in model.all().items():
            policy = self._policy(member, known)
            if policy == "average":
                averaged[name] = member.tensor
            elif policy == "copy":
                copied.append(member)
        return averaged, copied


def _matches(names: Names, name: str) -> bool:
    if callable(names):
        return bool(names(name))
    return any(fnmatch.fnmatchcase(name, glob) for glob in _globs_of(names))


def _globs_of(names: Names) -> Iterable[str]:
    """Return the globs of an option; a predicate has none."""
    if names is None or callable(names):
        return ()
    return (names,) if isinstance(names, str) else names
