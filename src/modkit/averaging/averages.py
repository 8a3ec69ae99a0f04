"""What is kept of each average: its tensors in flat buffers, its precision, and what BEMA and Window add."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from modkit._upstream import foreach_copy_
from modkit.averaging.named_tensors import PLAIN, Selection, check_choice
from modkit.averaging.precision import (
    PRECISIONS,
    OnNonfinite,
    Precision,
    full_value,
    is_rounded,
    kept_dtype,
)
from modkit.averaging.schedules import BEMA, Schedule, Window
from modkit.averaging.sharding import local_shard, shards_of


Tensors: TypeAlias = Mapping[str, Tensor]

# A tensor of at most so many elements shares a flat buffer with others: measured on CPU, gathering 512
# tensors and one ``lerp_`` beat ``_foreach_lerp_`` up to 1,024 elements (4x at 16), and lose from 4,096 on.
_SMALL: Final = 1024
_SHARED: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex128, torch.complex64),
    }
)
# Tensors of the same trailing shape are gathered by one ``torch.cat``, which pays from here on.
_LEAST_RUN: Final = 4


@dataclass(frozen=True)
class Options(Selection):
    """Options that every kind of average takes, validated.

    ``dtype`` is what all averages were cast to after they were made, if they were.

    Raises:
        TypeError, ValueError: An option is invalid; the text names it.
    """

    precision: Precision = "fp32"
    device: torch.device | None = None
    on_nonfinite: OnNonfinite = "ignore"
    seed: int = 0
    asynchronous: bool = False
    dtype: torch.dtype | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "precision", self.precision, PRECISIONS)
        check_choice(self.owner, "on_nonfinite", self.on_nonfinite, ("ignore", "skip", "raise"))
        if self.asynchronous and self.device != torch.device("cpu"):
            device = None if self.device is None else str(self.device)
            raise ValueError(
                f"{self.owner}: asynchronous=True needs device='cpu', got device={device!r}"
            )


# Flat buffers.


def can_share(tensor: Tensor) -> bool:
    """Return True for small contiguous floating-point tensors in host memory."""
    return (
        type(tensor) in PLAIN
        and 0 < tensor.numel() <= _SMALL
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.layout is torch.strided
        and tensor.dtype in _SHARED
    )


class FlatBuffer:
    """Small tensors in one piece of host memory, so that one kernel takes all of them.

    Each tensor has a storage of its own, over its part of the memory, so it is saved, shared and
    pickled like any other. What moves a tensor elsewhere (``tensor.data = ...``, ``share_memory()``)
    ends the sharing, which :meth:`intact` detects.

    Args:
        likes: Tensors of one dtype by name, in runs of the same trailing shape.
        dtype: Dtype of the buffer.
        wrap: Applied to each tensor that is made.

    Attributes:
        data: All elements.
        tensors: The tensors by name.
        exposed: Whether code outside of the engine can reach the tensors.
    """

    def __init__(
        self,
        likes: Tensors,
        dtype: torch.dtype,
        wrap: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    ) -> None:
        shapes = [like.shape for like in likes.values()]
        sizes = [shape.numel() for shape in shapes]
        self.data = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
        memory = (ctypes.c_char * self.data.nbytes).from_address(self.data.data_ptr())
        # Each tensor keeps the ctypes object alive, and that keeps the memory.
        memory.flat_buffer = self.data  # type: ignore[attr-defined]
        self.tensors: dict[str, Tensor] = {}
        self.exposed = False
        offset = 0
        for name, shape, size in zip(likes, shapes, sizes, strict=True):
            tensor = torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
            self.tensors[name] = wrap(name, tensor.view(shape))
            offset += size * dtype.itemsize
        self._listed = list(self.tensors.values())
        self._pointers = list(map(Tensor.data_ptr, self._listed))
        self._matrices = [tensor for tensor in self._listed if tensor.dim() > 1]

    def rename(self, names: Mapping[int, str]) -> None:
        """Give the tensors other names, by the ``id`` of the tensor."""
        self.tensors = {names.get(id(tensor), key): tensor for key, tensor in self.tensors.items()}

    def fill(self, sources: Tensors) -> None:
        """Copy the values of other tensors, by name."""
        foreach_copy_(self._listed, [sources[name] for name in self.tensors])

    def intact(self) -> bool:
        """Return True if all tensors are still where they were made, in the same order of elements."""
        if not self.exposed:
            return True
        # ``tensor.data = tensor.data.t()`` keeps the pointer.
        contiguous = all(map(Tensor.is_contiguous, self._matrices))
        return contiguous and list(map(Tensor.data_ptr, self._listed)) == self._pointers

    def holds(self, tensors: Tensors) -> bool:
        """Return True if the named tensors are those of this buffer."""
        return self.intact() and all(tensors.get(name) is t for name, t in self.tensors.items())


def flat_buffers(
    likes: Tensors,
    dtype_of: Callable[[Tensor], torch.dtype],
    wrap: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> list[FlatBuffer]:
    """Make flat buffers for those tensors that are small enough, alike and in host memory."""
    runs: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for name, like in likes.items():
        if can_share(like):
            # Scalars have the trailing shape of vectors, but are gathered in another way.
            runs.setdefault((like.dtype, like.ndim == 0, like.shape[1:]), {})[name] = like
    flat: dict[torch.dtype, dict[str, Tensor]] = {}
    for (dtype, *_), run in runs.items():
        if len(run) >= _LEAST_RUN:
            flat.setdefault(dtype, {}).update(run)
    return [
        FlatBuffer(found, dtype_of(next(iter(found.values()))), wrap) for found in flat.values()
    ]


def _shared_again(tensors: dict[str, Tensor], layout: list[list[str]]) -> list[FlatBuffer]:
    """Move tensors into flat buffers of this layout, unless they are elsewhere by now."""
    flats: list[FlatBuffer] = []
    for names in layout:
        found = {name: tensors[name] for name in names if name in tensors}
        movable = all(can_share(one) and not one.is_shared() for one in found.values())
        if len(found) < len(names) or not movable:
            return []
        flat = FlatBuffer(found, found[names[0]].dtype)
        flat.fill(found)
        tensors.update(flat.tensors)
        flats.append(flat)
    return flats


# Averages.


class Average:
    """The average of named tensors: what is kept, and what a checkpoint holds of it.

    Args:
        options: Options of the average.

    Attributes:
        tensors: Averages by name.
        errors: Low-order error terms by name, for ``precision="compensated"``.
        models: Copies of whole models that the kind of average keeps besides.
        flats: Flat buffers of the averages and, in the same order, of the error terms.
    """

    compensates: ClassVar = True

    def __init__(self, options: Options) -> None:
        self.options = options
        self.models: list[dict[str, Tensor]] = []
        self.tensors: dict[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
        self.flats: list[FlatBuffer] = []
        self.error_flats: list[FlatBuffer] = []
        self.generators: dict[torch.device, torch.Generator] = {}

    @property
    def moved(self) -> "Average | None":
        """The average that a step moves towards the current values, if any."""
        return self

    def kept_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of the average of a tensor."""
        if self.options.dtype is not None and tensor.is_floating_point():
            return self.options.dtype
        # A kind without error terms is computed from exact parts, and rounded once.
        exact = self.compensates or self.options.precision != "compensated"
        return kept_dtype(tensor.dtype, self.options.precision if exact else "fp32")

    def set_options(self, options: Options) -> None:
        """Take other options, before there is anything to average."""
        self.options = options

    def expose(self) -> None:
        """Note that users hold the tensors, so that they may give them other memory."""
        for flat in (*self.flats, *self.error_flats):
            flat.exposed = True

    def reset(self) -> None:
        """Forget everything, so that the next step is the first one."""
        self.tensors, self.errors, self.flats, self.error_flats = {}, {}, [], []
        self.models, self.generators = [], {}

    def start(self, members: Tensors) -> None:
        """Allocate an average of these tensors; the first step copies them."""
        self.reset()
        self.tensors, self.flats = self._allocated(members)
        if self.compensates and self.options.precision == "compensated":
            narrow = {
                name: member
                for name, member in members.items()
                if self.tensors[name].dtype == member.dtype or is_rounded(self.tensors[name].dtype)
            }
            self.errors, self.error_flats = self._allocated(narrow)
            for error in self.errors.values():
                error.zero_()

    def _allocated(self, members: Tensors) -> tuple[dict[str, Tensor], list[FlatBuffer]]:
        flats: list[FlatBuffer] = []
        if self.options.device is None or self.options.device.type == "cpu":
            flats = flat_buffers(members, self.kept_dtype)
        shared = {name: tensor for flat in flats for name, tensor in flat.tensors.items()}
        tensors = {
            name: shared[name] if name in shared else self._room_for(tensor)
            for name, tensor in members.items()
        }
        return tensors, flats

    def _room_for(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(
            tensor,
            dtype=self.kept_dtype(tensor),
            device=self.options.device,
            requires_grad=False,
        )

    def place(self, members: Tensors) -> None:
        """Follow a model that was moved, unless the average has a device of its own."""
        for name, current in members.items():
            device = self.options.device or current.device
            if self.tensors[name].device != device:
                self.tensors[name] = self.tensors[name].to(device)
                for others in (self.errors, *self.models):
                    if name in others:
                        others[name] = others[name].to(device)

    def cast(self, options: Options, members: Tensors) -> None:
        """Move and cast what is kept, for other options, without a change of values beyond rounding."""
        self.set_options(options)
        self.resize(members)

    def resize(self, members: Tensors) -> None:
        """Drop the averages of tensors that are gone; new ones start as a copy."""
        old, errors, generators, models = self.tensors, self.errors, self.generators, self.models
        self.start(members)
        for name, tensor in self.tensors.items():
            kept = _same_shape(old, name, tensor)
            if kept is None:
                self._take_over(name, members[name], None)
            else:
                self._take_over(name, kept, errors.get(name))
        self.generators = generators
        self.models = [self._copied(copies, members) for copies in models]

    def _copied(self, copies: Tensors, missing: Tensors) -> dict[str, Tensor]:
        """Return copies like the averages, with values for those that are missing or do not fit."""
        found = {name: torch.empty_like(average) for name, average in self.tensors.items()}
        for name, copy in found.items():
            known = _same_shape(copies, name, copy)
            source = shards_of(missing[name] if known is None else known, copy)
            local_shard(copy).copy_(local_shard(source))
        return found

    def _take_over(self, name: str, value: Tensor, error: Tensor | None) -> None:
        """Copy another average and its error term, which may be of other dtypes."""
        tensor, value = local_shard(self.tensors[name]), local_shard(value)
        own = self.errors.get(name)
        if error is not None and (own is None or tensor.dtype != value.dtype):
            wide = torch.promote_types(
                torch.promote_types(value.dtype, tensor.dtype), torch.float32
            )
            value, error = value.to(wide).add(local_shard(error)), None
        tensor.copy_(value)
        if own is not None:
            # What the tensor cannot hold of the value.
            lost = value.to(tensor.device) - tensor if error is None else local_shard(error)
            local_shard(own).copy_(lost)

    def observe(self, currents: Tensors, n: int, finite: Tensor | None) -> None:
        """Take what the average needs of step ``n`` besides its move."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied, with the names in flat buffers instead of those."""
        # Pickling for another process moves the tensors into shared memory.
        self.expose()
        flats = [list(flat.tensors) for flat in self.flats]
        error_flats = [list(flat.tensors) for flat in self.error_flats]
        return {**vars(self), "flats": flats, "error_flats": error_flats}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose small tensors share buffers of its own."""
        self.__dict__.update(state)
        self.flats = _shared_again(self.tensors, state["flats"])
        self.error_flats = _shared_again(self.errors, state["error_flats"])

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the stochastic rounding on a device."""
        if device not in self.generators:
            seeded = torch.Generator(device=device).manual_seed(self.options.seed)
            self.generators[device] = seeded
        return self.generators[device]

    def seed(self, seed: int) -> None:
        """Seed the generators of the stochastic rounding for one step."""
        self.options = replace(self.options, seed=seed)
        for generator in self.generators.values():
            generator.manual_seed(seed)

    def values(self) -> dict[str, Tensor]:
        """Return the averages by name: not copies, except of tensors with error terms that matter."""
        self.expose()
        if not self.errors:
            return self.tensors
        return {name: full_value(one, self.errors.get(name)) for name, one in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on; tensors are not copied."""
        self.expose()
        states = {str(device): one.get_state() for device, one in self.generators.items()}
        return {"tensors": dict(self.tensors), "rests": dict(self.errors), "generators": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load averages whose names and shapes have been checked."""
        for name, tensor in self.tensors.items():
            error = state["rests"].get(name)
            self._take_over(
                name,
                shards_of(state["tensors"][name], tensor),
                None if error is None else shards_of(error, tensor),
            )
        self.generators = {}
        for device, random_state in state["generators"].items():
            self.generator(torch.device(device)).set_state(random_state.cpu())


class CorrectedAverage(Average):
    """The average of :class:`~modkit.schedules.BEMA`: a plain average and its correction, added up.

    ``models`` contains the first model.
    """

    compensates: ClassVar = False

    def __init__(self, schedule: BEMA, options: Options) -> None:
        super().__init__(options)
        self._schedule = schedule
        self._plain = Average(options)

    @property
    @override
    def moved(self) -> Average | None:
        return self._plain

    @override
    def set_options(self, options: Options) -> None:
        super().set_options(options)
        self._plain.set_options(options)

    @override
    def reset(self) -> None:
        super().reset()
        self._plain.reset()

    @override
    def start(self, members: Tensors) -> None:
        super().start(members)
        self._plain.start(members)
        self.models = [{name: torch.empty_like(value) for name, value in self.tensors.items()}]

    @override
    def place(self, members: Tensors) -> None:
        super().place(members)
        self._plain.place(members)

    @override
    def resize(self, members: Tensors) -> None:
        plain, self._plain = self._plain, Average(self.options)
        super().resize(members)
        plain.resize(members)
        self._plain = plain

    @override
    def observe(self, currents: Tensors, n: int, finite: Tensor | None) -> None:
        """Correct the average by the way that step ``n`` is away from the first."""
        correction = self._schedule.correction(n)
        plains, (firsts,) = self._plain.values(), self.models
        for name, tensor in self.tensors.items():
            value, first = local_shard(tensor), local_shard(firsts[name])
            current = currents[name].to(value.device)
            if n == 0:
                first.copy_(current)
            plain = local_shard(plains[name])
            way = current.to(plain.dtype) - first
            corrected = way.mul_(correction).add_(plain).to(value.dtype)
            if finite is not None:
                corrected = torch.where(finite.to(value.device), corrected, value)
            value.copy_(corrected)

    @override
    def state_dict(self) -> dict[str, Any]:
        more = {"plain": self._plain.state_dict(), "first": dict(*self.models)}
        return {**super().state_dict(), **more}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an average; one of another kind counts as the first model as well."""
        super().load_state_dict({**state, "rests": {}, "generators": {}})
        self._plain.load_state_dict(state.get("plain", state))
        self.models = [self._copied(state.get("first", {}), state["tensors"])]


class WindowAverage(Average):
    """The average of :class:`~modkit.schedules.Window`: the mean of the latest models.

    ``models`` is a ring of their copies, from which the mean is computed each time: a running sum from
    which the oldest copy is subtracted would drift.
    """

    compensates: ClassVar = False

    def __init__(self, window: int, options: Options) -> None:
        super().__init__(options)
        self._window = window
        self._seen = 0

    @property
    @override
    def moved(self) -> Average | None:
        return None

    @override
    def reset(self) -> None:
        super().reset()
        self._seen = 0

    @override
    def resize(self, members: Tensors) -> None:
        seen = self._seen
        super().resize(members)
        self._seen = seen

    @override
    def observe(self, currents: Tensors, n: int, finite: Tensor | None) -> None:
        """Replace the oldest copy by the current values, and take the mean."""
        slot = self._seen % self._window
        self._seen += 1
        if slot == len(self.models):
            empty = {name: torch.empty_like(mean) for name, mean in self.tensors.items()}
            self.models.append(empty)
        for name, mean in self.tensors.items():
            local_shard(self.models[slot][name]).copy_(currents[name])
            wide = torch.float32 if mean.dtype.itemsize < torch.float32.itemsize else mean.dtype
            copies = torch.stack([local_shard(copies[name]) for copies in self.models])
            local_shard(mean).copy_(copies.mean(0, dtype=wide))

    @override
    def state_dict(self) -> dict[str, Any]:
        ring = [dict(copies) for copies in self.models]
        return {**super().state_dict(), "ring": ring, "seen": self._seen}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a mean; one without copies, of another kind of average, counts as one copy."""
        super().load_state_dict(state)
        ring: list[Tensors] = state.get("ring", [state["tensors"]])
        self.models = [self._copied(copies, {}) for copies in ring]
        self._seen = state.get("seen", 1)


def _same_shape(tensors: Tensors, name: str, like: Tensor) -> Tensor | None:
    """Return the tensor of a name, or None if there is none, or it has another shape."""
    found = tensors.get(name)
    return found if found is not None and found.shape == like.shape else None


def average_for(schedule: Schedule, options: Options) -> Average:
    """Return the kind of average that a schedule needs.

    Raises:
        ValueError: The schedule does not work with ``on_nonfinite="skip"``.
    """
    if isinstance(schedule, BEMA):
        return CorrectedAverage(schedule, options)
    if isinstance(schedule, Window):
        if options.on_nonfinite == "skip":
            # Which copies count would have to be read from the device.
            raise ValueError(
                f"{options.owner}: on_nonfinite='skip' does not work with {schedule}; 'raise' does"
            )
        return WindowAverage(schedule.window, options)
    return Average(options)
