"""Storage of an average: its tensors, flat buffers of the small ones, and error terms."""

import ctypes
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from modkit._messages import MSG_LEAVE_OUT, add_note
from modkit._upstream import PLAIN, copy_, copy_all_, make_parameter
from modkit.averaging.options import Options
from modkit.averaging.precision import Precision, full_value, is_averaged, is_rounded
from modkit.averaging.sharding import local_shard, shards_of
from modkit.averaging.watch import Placement


Tensors: TypeAlias = Mapping[str, Tensor]

# A tensor of at most so many elements shares a flat buffer with others: measured on CPU, gathering
# 512 tensors and one ``lerp_`` beat ``_foreach_lerp_`` up to 1,024 elements (4x at 16), and lose
# from 4,096 on.
_SMALL: Final = 1024
# Dtypes that have arithmetic in all kernels of an average.
_SHAREABLE: Final = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
)
# Tensors of the same trailing shape are gathered by one ``torch.cat``, which pays from here on.
_LEAST_RUN: Final = 4


def can_share(tensor: Tensor) -> bool:
    """Return True for small contiguous floating-point tensors in host memory.

    Subclasses are left out, because they may have arithmetic of their own.
    """
    return (
        type(tensor) in PLAIN
        and 0 < tensor.numel() <= _SMALL
        and tensor.dtype in _SHAREABLE
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def has_flat_buffers(precision: Precision) -> bool:
    """Return True if small averages of a precision share flat buffers.

    Error terms are kept per tensor, and stochastic rounding draws per tensor, so that copies of an
    average, which have no flat buffers, draw alike.
    """
    return precision not in {"compensated", "stochastic"}


def has_own_memory(tensor: Tensor) -> bool:
    """Return True for plain tensors in host memory that fill their storage, without gradients.

    These are the ones that ``clone`` copies as ``deepcopy`` does, ten times as fast.
    """
    return (
        type(tensor) is Tensor
        and not (tensor.is_complex() or tensor.is_quantized)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_inference()
        # ``deepcopy`` copies gradients and attributes of a tensor as well.
        and tensor.grad is None
        and not vars(tensor)
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


class FlatBuffer:
    """Small tensors in one piece of host memory, so that one kernel takes all of them.

    Each tensor has a storage of its own over its part of ``data``, so it is saved, shared and
    pickled like any other, but cannot be resized: torch makes a storage over memory that it does
    not own (``frombuffer``, a slice of a storage, DLPack, a pointer) without an allocator. Tensors
    with ordinary storages would have to be scattered after each step, which takes as long as
    stepping them one by one. Moving one elsewhere (``tensor.data = ...``, ``share_memory()``) ends
    the sharing, which :meth:`is_intact` detects.

    Args:
        likes: Tensors of one dtype by name, in runs of the same trailing shape.
        dtype: Dtype of the buffer.
        as_parameters: Whether to make parameters, which require gradients as ``likes`` do.

    Attributes:
        data: All elements.
        names: Names of the tensors, in the order of the memory; "" for one that is no longer
            averaged.
        tensors: The tensors, in the same order.
        exposed: Whether code outside of the engine has the tensors, and so may move them.
    """

    def __init__(self, likes: Tensors, dtype: torch.dtype, *, as_parameters: bool = False) -> None:
        shapes = [like.shape for like in likes.values()]
        sizes = [shape.numel() for shape in shapes]
        self.data: Tensor = torch.zeros(sum(sizes), dtype=dtype, device="cpu")

        memory = (ctypes.c_char * self.data.nbytes).from_address(self.data.data_ptr())
        # Each tensor keeps the ctypes object alive, and that keeps the memory: the buffer itself
        # may be gone, and a tensor of it still in use.
        memory.flat_buffer = self.data  # type: ignore[attr-defined]

        # Lists of one order, that of the memory; a tensor that is no longer averaged has the name
        # "".
        self.names: list[str] = list(likes)
        self.tensors: list[Tensor] = []
        self.exposed = False

        offset = 0
        for shape, size in zip(shapes, sizes, strict=True):
            tensor = torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
            self.tensors.append(tensor if len(shape) == 1 else tensor.view(shape))
            offset += size * dtype.itemsize

        if as_parameters:
            require_grad = [like.requires_grad for like in likes.values()]
            self.tensors = list(map(make_parameter, self.tensors, require_grad))
        self.placement: Placement = Placement(self.tensors)

    def rename(self, names: Mapping[int, str]) -> None:
        """Give the tensors the names that they have now, by the ``id`` of the tensor.

        The old name of a tensor that was removed may by now be that of another one.
        """
        self.names = [names.get(id(tensor), "") for tensor in self.tensors]

    def fill(self, sources: Tensors) -> None:
        """Copy the values of other tensors into the buffer.

        Args:
            sources: The tensors by name, at least those of this buffer.
        """
        copy_all_(self.tensors, [sources[name] for name in self.names])

    def is_intact(self) -> bool:
        """Return True if all tensors are still where they were made, with elements in order."""
        return not (self.exposed and self.placement.changed())

    def holds(self, tensors: Tensors) -> bool:
        """Return True if the named tensors are those of this buffer.

        Args:
            tensors: The tensors that are in use now. A name may have got another one, or none.
        """
        return self.is_intact() and all(
            map(operator.is_, map(tensors.get, self.names), self.tensors)
        )


def flat_buffers(
    likes: Tensors, options: Options, *, as_parameters: bool = False
) -> list[FlatBuffer]:
    """Make flat buffers for those tensors that are small enough, alike and in host memory.

    Args:
        likes: Tensors by name.
        options: They give the dtype of each buffer.
        as_parameters: Whether to make parameters, which require gradients as ``likes`` do.

    Returns:
        At most one buffer for each dtype of ``likes``. Its values are zero.
    """
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
        FlatBuffer(tensors, options.kept_dtype(dtype), as_parameters=as_parameters)
        for dtype, tensors in flat.items()
    ]


class Average:
    """The average of named tensors: what is stored of it, and what a checkpoint holds of it.

    Args:
        options: Options of the average, kept as an attribute.

    Attributes:
        tensors: Averages by name.
        errors: Low-order error terms by name, with ``precision="compensated"``.
        flats: Flat buffers, of which small tensors are parts.
        generators: Generators of the stochastic rounding, by device.
        statistics: Batch normalization statistics that were computed for this average, by name.
    """

    def __init__(self, options: Options) -> None:
        self.options: Options = options
        self.reset()

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self.tensors: dict[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
        self.flats: list[FlatBuffer] = []
        self.generators: dict[torch.device, torch.Generator] = {}
        # Batch normalization statistics for this average, until the next step.
        self.statistics: dict[str, Tensor] = {}

    def expose(self) -> None:
        """Note that users hold the tensors, so that they may give them other memory."""
        for flat in self.flats:
            flat.exposed = True

    def start(self, members: Tensors) -> None:
        """Allocate an average; its values are those of the first step, which copies.

        Args:
            members: Tensors of the model by name. They give shapes and, with the options, dtypes
                and devices.
        """
        self.reset()
        device, precision = self.options.device, self.options.precision
        if has_flat_buffers(precision) and (device is None or device.type == "cpu"):
            self.flats = flat_buffers(members, self.options)
        in_flats: dict[str, Tensor] = {}
        for flat in self.flats:
            in_flats.update(zip(flat.names, flat.tensors, strict=True))

        # In the order of the model, which is that of the state dict.
        for name, member in members.items():
            dtype = self.options.kept_dtype(member.dtype)
            tensor = in_flats.get(name)
            if tensor is None:
                try:
                    tensor = torch.empty_like(
                        member, dtype=dtype, device=device, requires_grad=False
                    )
                except NotImplementedError as error:
                    # The class of a quantized weight, for one, does not know which tensor it is.
                    add_note(error, f"EMA: {name} cannot be averaged. {MSG_LEAVE_OUT}")
                    raise
            self.tensors[name] = tensor

            has_error = precision == "compensated" and is_averaged(member)
            # A wider average, as ``EMA.to`` makes it, loses nothing that an error term would keep.
            if has_error and (dtype == member.dtype or is_rounded(dtype)):
                self.errors[name] = torch.zeros_like(tensor)

    def place(self, members: Tensors) -> None:
        """Follow a model that was moved or sharded; averages with a device of their own stay there.

        Args:
            members: Tensors of the model by name.
        """
        for name, current in members.items():
            device = self.options.device or current.device

            for stored in (self.tensors, self.errors):
                if name in stored:
                    tensor = shards_of(stored[name], current)
                    if tensor is not stored[name] or tensor.device != device:
                        # A view of the full tensor would keep all of its memory.
                        stored[name] = tensor.to(device, copy=True)

    def resized(
        self, members: Tensors, options: Options, former_names: Mapping[str, str]
    ) -> "Average":
        """Return the average of other members, or of the same ones in another dtype or device.

        Args:
            members: Tensors of the model by name.
            options: Options of the new average.
            former_names: Maps names of members to their names in this average. Members without a
                name here start as a copy, and so do those of another shape.

        Returns:
            The new average, in memory of its own. This one is unchanged.
        """
        new = Average(options)
        new.start(members)
        for name, tensor in new.tensors.items():
            former_name = former_names.get(name, "")
            average = self.tensors.get(former_name)
            if average is None or average.shape != tensor.shape:
                new._take_over(name, members[name], None)
            else:
                new._take_over(name, average, self.errors.get(former_name))

        new.generators = self.generators
        new.set_statistics(self.statistics)
        return new

    def set_statistics(self, statistics: Tensors) -> None:
        """Keep batch normalization statistics until the next step.

        Args:
            statistics: The statistics by name, which are moved to the device of the average.
        """
        device = self.options.device
        self.statistics = {name: t.to(device or t.device) for name, t in statistics.items()}

    def _take_over(self, name: str, value: Tensor, error: Tensor | None) -> None:
        """Copy another average and its error term, which may be full, or of other dtypes."""
        tensor = local_shard(self.tensors[name])
        value = local_shard(shards_of(value, self.tensors[name]))
        error = None if error is None else local_shard(shards_of(error, self.tensors[name]))
        error_here = self.errors.get(name)

        if error is not None and (error_here is None or tensor.dtype != value.dtype):
            # An error term only fits the tensor that it was computed for: add it first.
            wide = torch.promote_types(value.dtype, tensor.dtype)
            wide = torch.promote_types(wide, torch.float32)
            value = value.to(wide).add(error)
            error = None
        copy_(tensor, value)

        if error_here is not None:
            # Without an error term of its own, it is what rounding to the dtype here has lost.
            lost = value.to(tensor.device) - tensor if error is None else error
            copy_(local_shard(error_here), lost)

    def __getstate__(self) -> dict[str, Any]:
        # Pickling for another process moves the tensors into shared memory. A copy has no flat
        # buffers.
        self.expose()
        return {**vars(self), "flats": []}

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the stochastic rounding on a device, seeded when it is made.

        Args:
            device: Device of the averages.

        Returns:
            The generator, which is one of the host for XLA.
        """
        if device.type == "xla":
            # XLA has one random state for all, and no generators.
            device = torch.device("cpu")
        if device not in self.generators:
            seeded = torch.Generator(device=device).manual_seed(self.options.seed)
            self.generators[device] = seeded
        return self.generators[device]

    def seed(self, seed: int) -> None:
        """Seed the stochastic rounding of one step, and of generators that are made later.

        Args:
            seed: The seed, in place of that of the options.
        """
        self.options = replace(self.options, seed=seed)
        for generator in self.generators.values():
            generator.manual_seed(seed)

    def values(self) -> dict[str, Tensor]:
        """Return the averages by name.

        Returns:
            The tensors themselves. Only 16-bit averages with error terms are computed: they are the
            sums of both, in float32.
        """
        self.expose()
        if not self.errors:
            return self.tensors
        return {name: full_value(t, self.errors.get(name)) for name, t in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on; tensors are not copied.

        Returns:
            ``"tensors"`` and error terms, ``"rests"``, by name; the states of the random
            ``"generators"`` by device; and batch normalization ``"statistics"``, if there are any.
        """
        self.expose()
        state: dict[str, Any] = {
            "tensors": dict(self.tensors),
            "rests": dict(self.errors),
            "generators": {str(device): g.get_state() for device, g in self.generators.items()},
        }
        # Older versions do not know the entry, so it is only there if it is needed.
        if self.statistics:
            state["statistics"] = dict(self.statistics)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values of a state into the tensors of this average, which was started.

        Args:
            state: What :meth:`state_dict` returns, with names and shapes that were checked. Full
                tensors are sharded like those here.
        """
        for name in self.tensors:
            self._take_over(name, state["tensors"][name], state["rests"].get(name))

        self.generators = {}
        for device, random_state in state["generators"].items():
            self.generator(torch.device(device)).set_state(random_state.cpu())
