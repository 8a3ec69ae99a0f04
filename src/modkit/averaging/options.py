"""The options of averages, validated, and which tensors of a model they select."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, TypedDict, cast, get_args

import torch
from torch import Tensor

from modkit.averaging.precision import PRECISIONS, OnNonfinite, Precision, is_averaged, kept_dtype
from modkit.averaging.schedules import Decay
from modkit.averaging.tensors import Member, NamedTensors


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Globs of names (``"head.*"``), or a predicate.
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
BufferPolicy: TypeAlias = Literal["copy", "average", "ignore"]
# One policy for all buffers, or one for each glob of names; the first glob that matches counts.
Buffers: TypeAlias = BufferPolicy | Mapping[str, BufferPolicy]
Device: TypeAlias = int | str | torch.device | None


def check_choice(owner: str, name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless an option of ``owner`` has one of its few values."""
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"{owner}: {name} must be one of {expected}, got {value!r}")


def checked_count(name: str, value: int, least: int, owner: str = "EMA") -> int:
    """Return a number of steps, an int and no bool, or raise TypeError or ValueError."""
    if isinstance(cast("object", value), bool) or not isinstance(cast("object", value), int):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{owner}: {name} must be {least} or more, got {value}")
    return value


def check_index(index: int, count: int) -> None:
    """Raise TypeError or IndexError unless an index is that of one of so many averages."""
    if isinstance(index, bool) or not isinstance(cast("object", index), SupportsIndex):
        raise TypeError(f"EMA: index must be an int, got {index!r}")
    if not 0 <= index < count:
        raise IndexError(f"EMA: index is {index}, and there are {count} averages, numbered from 0")


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
        precision: ``"fp32"``, ``"fp64"``, ``"same"`` as the parameter, or ``"stochastic"``.
            Default: ``"fp32"``.
        device: Device of the averages. Default: None, that of each parameter.
        buffers: ``"copy"``, ``"average"`` or ``"ignore"`` for floating-point buffers, or a dict
            from globs of names to one of the three. Default: ``"copy"``.
        include: Globs of names, or a predicate: parameters to average. Default: None, all.
        exclude: Globs of names, or a predicate: parameters not to average. Default: None.
        trainable_only: Average only parameters that require gradients at the first update, and
            those that are unfrozen later from then on. Default: False.
        on_nonfinite: ``"ignore"`` averages infinite and NaN parameters, ``"skip"`` skips the step,
            ``"raise"`` raises RuntimeError. Default: ``"ignore"``.
        seed: Seed for stochastic rounding. Default: 0.
        process_group: The ranks that skip a step together. Default: None, those that share a
            tensor.

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
    process_group: "ProcessGroup | None"


@dataclass(frozen=True)
class Options:
    """Options of an average, validated, with the defaults of ``EMA``, which describes them."""

    include: Names = None
    exclude: Names = None
    buffers: Buffers = "copy"
    trainable_only: bool = False
    precision: Precision = "fp32"
    device: torch.device | None = None
    on_nonfinite: OnNonfinite = "ignore"
    seed: int = 0
    process_group: Any = None
    # ``AveragedModel`` copies parameters that are not averaged, and averages integers, which
    # truncates, as torch does.
    copy_rest: bool = False
    integers: bool = False
    # The class that errors name.
    owner: str = "EMA"

    def __post_init__(self) -> None:
        buffers = self.buffers
        for policy in buffers.values() if isinstance(buffers, Mapping) else [buffers]:
            check_choice(self.owner, "buffers", policy, get_args(BufferPolicy))
        check_choice(self.owner, "precision", self.precision, PRECISIONS)
        check_choice(self.owner, "on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        checked_count("seed", self.seed, 0, self.owner)
        if self.device is not None and self.device.type == "meta":
            raise ValueError(
                f"{self.owner}: device is meta, where averages would have no values. Pass another "
                "one, or None for that of each parameter. Nothing has been changed."
            )
        object.__setattr__(self, "include", self._names_in("include", self.include))
        object.__setattr__(self, "exclude", self._names_in("exclude", self.exclude))

    def __deepcopy__(self, memo: object) -> "Options":
        # Nothing changes it, and a process group cannot be copied.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other groups.
        return {**vars(self), "process_group": None}

    def _names_in(self, option: str, names: Names) -> Names:
        """Return the names of an option: a predicate, one glob, or a tuple of globs."""
        if names is None or isinstance(names, str) or callable(names):
            return names
        # They may come from an iterator, which can be read once.
        is_iterable = isinstance(cast("object", names), Iterable)
        globs: tuple[object, ...] = tuple(names) if is_iterable else (names,)
        if not all(isinstance(glob, str) for glob in globs):
            raise TypeError(
                f"{self.owner}: {option} must be globs of names or a predicate, got {names!r}"
            )
        return cast("tuple[str, ...]", globs)

    def check_selection(self, model: torch.nn.Module, named: NamedTensors) -> None:
        """Raise ValueError if no parameter of a model is selected, or a glob matches no name."""
        # Of a lazy model too: names and ``requires_grad`` are there before shapes are.
        if not any(map(self.chooses, named.parameters.values())):
            raise ValueError(
                f"EMA: include={self.include!r}, exclude={self.exclude!r}, "
                f"trainable_only={self.trainable_only} select none of the {len(named.parameters)} "
                f"parameters of {type(model).__name__}. Create the EMA when the model has its "
                "parameters; a quantized model keeps its weights elsewhere."
            )
        self.check_globs(model)

    def check_globs(self, model: torch.nn.Module) -> None:
        """Raise ValueError if a glob matches no name: it is a mistake that would have no effect.

        ``"*"`` is not one, and a lazy model does not have all of its tensors yet.
        """
        globs = {
            "include": _globs_of(self.include),
            "exclude": _globs_of(self.exclude),
            "buffers": self.buffers if isinstance(self.buffers, Mapping) else (),
        }
        # Without globs, the model need not be walked.
        named = NamedTensors(model) if any(globs.values()) else None
        if named is None or named.has_lazy():
            return

        unused: list[str] = []
        for option, chosen in globs.items():
            names = [*named.buffers, *named.empty] if option == "buffers" else named.parameters
            matched = {"*", *(glob for glob in chosen if any(_matches(glob, n) for n in names))}
            unused += [f"{option}={glob!r}" for glob in chosen if glob not in matched]
        if unused:
            first_names = ", ".join([*named.parameters, *named.buffers][:8])
            tied = [f"; {alias} is tied to {name}" for alias, name in named.aliases.items()]
            raise ValueError(
                f"{self.owner}: no name of {type(model).__name__} matches {', '.join(unused)}. The "
                f"names of its tensors begin with {first_names}{''.join(tied[:4])}. Correct the "
                "globs, or leave them out."
            )

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the average of a tensor of ``dtype`` is kept."""
        return kept_dtype(dtype, self.precision)

    def check_width(self, problem: str, dtype: torch.dtype, remedy: str) -> None:
        """Raise ValueError if a dtype has fewer bits than ``precision`` promises."""
        # The others keep the dtype of the parameter.
        if self.precision not in ("fp32", "fp64"):
            return

        least = kept_dtype(dtype, self.precision)
        if least != dtype:
            raise ValueError(
                f"{problem} {dtype}, but precision={self.precision!r} keeps averages in {least} or "
                "wider: in fewer bits updates are rounded away. For averages in bf16 or fp16 use "
                f"precision='stochastic'. {remedy}"
            )

    def chooses(self, member: Member, averaged: Iterable[str] = ()) -> bool:
        """Return True if a parameter is averaged; ``averaged`` stay so when they are frozen."""
        name = member.name
        if self.include is not None and not _matches(self.include, name):
            return False
        trains = not self.trainable_only or member.tensor.requires_grad or name in averaged
        return trains and not _matches(self.exclude, name)

    def _policy(self, member: Member, averaged: Iterable[str]) -> BufferPolicy:
        """Return what is done with a tensor; integers have no average and are copied."""
        has_average = is_averaged(member.tensor)
        if member.is_parameter:
            if not self.chooses(member, averaged):
                return "copy" if self.copy_rest else "ignore"
            return "average" if has_average or self.integers else "copy"

        for glob, policy in self.buffers.items() if isinstance(self.buffers, Mapping) else ():
            # The first glob that matches decides.
            if fnmatch.fnmatchcase(member.name, glob):
                return "copy" if policy == "average" and not has_average else policy
        # Torch leaves these out of the state: a cache, a mask, a table of angles.
        if not (member.persistent or self.copy_rest):
            return "ignore"
        return "copy" if isinstance(self.buffers, Mapping) or not has_average else self.buffers

    def split(
        self, model: NamedTensors, averaged: Iterable[str] = ()
    ) -> tuple[dict[str, Tensor], list[Member]]:
        """Divide a model's tensors into those to average, by name, and members to copy.

        Names in ``averaged`` have averages already, which stay so when they are frozen.
        """
        to_average: dict[str, Tensor] = {}
        to_copy: list[Member] = []
        for name, member in model.all().items():
            policy = self._policy(member, averaged)
            if policy == "average":
                to_average[name] = member.tensor
            elif policy == "copy":
                to_copy.append(member)
        return to_average, to_copy


def _matches(names: Names, name: str) -> bool:
    """Return True if the predicate holds for a name, or a glob matches it."""
    if callable(names):
        return bool(names(name))
    return any(fnmatch.fnmatchcase(name, glob) for glob in _globs_of(names))


def _globs_of(names: Names) -> Iterable[str]:
    """Return the globs of an option; a predicate has none."""
    if names is None or callable(names):
        return ()
    return (names,) if isinstance(names, str) else names
