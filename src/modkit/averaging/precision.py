"""Precision of averages: the dtype that they are kept in, and one step of an average in each.

An average moves by a small fraction of a small difference. In bf16 and fp16 that is often below the
rounding error, and the average stalls: bf16 from a decay of 0.99 on, fp32 from about 0.99999 on.

=============== ====================================================================================
``precision``   how the average is kept
=============== ====================================================================================
same            in the dtype of the parameter
fp32            in float32 or wider (float64 stays)
fp64            in float64
stochastic      in the dtype of the parameter, with stochastic rounding (bf16, fp16; others as fp32)
=============== ====================================================================================

8-bit floating-point dtypes have no arithmetic, so their averages are in float32 or float64.

Steps of :class:`~modkit.optim.swa_utils.AveragedModel` are bitwise identical to torch's, so each
function computes in torch's form: ``a + (b - a) / n``, ``lerp`` and ``w * a + (1 - w) * b`` round
differently.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from modkit._upstream import (
    PLAIN,
    copy_all_,
    flatten,
    foreach_devices,
    foreach_lerp_,
    foreach_norm,
    unflatten,
)
from modkit.averaging.sharding import groups_of, local_shard, true_everywhere


Precision: TypeAlias = Literal["same", "fp32", "fp64", "stochastic"]
OnNonfinite: TypeAlias = Literal["ignore", "skip", "raise"]
TensorList: TypeAlias = tuple[Tensor, ...] | list[Tensor]
Weight: TypeAlias = Tensor | float

PRECISIONS: Final = get_args(Precision)

# Types of devices whose elements can be read without synchronization.
HOST_DEVICES: Final = frozenset({"cpu"})

# Elements that are processed at a time where a step needs temporaries. Measured on CPU for bf16
# averaged in fp32, relative to one fp32 ``lerp_``: 4.5x at 16K, 1.5x at 256K, 1.0x at 1M, 1.4x at
# 4M. An accelerator waits for the host to start kernels, so larger parts are better there: these
# are 32 MB of float32, which the caches of recent ones hold.
CHUNK: Final = 1 << 20
DEVICE_CHUNK: Final = 1 << 23

# Low-order bits of a float32 that each 16-bit dtype lacks: those that are rounded stochastically.
ROUNDED: Final = {torch.bfloat16: 16, torch.float16: 13}


def is_averaged(tensor: Tensor) -> bool:
    """Return True for floating-point and complex tensors: integers have no average."""
    return tensor.is_floating_point() or tensor.is_complex()


def kept_dtype(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """Return the dtype in which the average of a tensor is kept.

    Args:
        dtype: Dtype of the tensor.
        precision: The option, as in the table above.

    Returns:
        The dtype; integers and booleans keep theirs, because they have no average.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    wide = torch.float64 if precision == "fp64" else torch.float32
    if dtype.is_floating_point and dtype.itemsize == 1:
        # These dtypes have no arithmetic.
        return wide
    stays = precision == "same" or (precision == "stochastic" and dtype in ROUNDED)
    return dtype if stays else torch.promote_types(dtype, wide)


def lerp_(
    averages: Sequence[list[Tensor]], currents: list[Tensor], weights: Sequence[Weight]
) -> None:
    """Move each average by its weight towards the current values, in place.

    Args:
        averages: Averages, each a list of tensors; all of one device and dtype.
        currents: Current values of one device and dtype, which may differ from those of the
            averages.
        weights: How far each average moves: 0 stays, 1 copies. A number, or a tensor of one element
            in the memory of the device.
    """
    like = averages[0][0]
    current = currents[0]
    if like.dtype == current.dtype and like.device == current.device:
        _lerp_all(averages, currents, weights)
        return

    elements = min(sum(tensor.numel() for tensor in currents), _chunk_for(like))
    scratch = torch.empty(elements, dtype=like.dtype, device=like.device)
    for part in parts(*averages, currents):
        _lerp_all(part[:-1], _moved(part[-1], scratch), weights)


def _lerp_all(
    averages: Sequence[list[Tensor]], currents: list[Tensor], weights: Sequence[Weight]
) -> None:
    for tensors, weight in zip(averages, weights, strict=True):
        if not isinstance(weight, Tensor):
            foreach_lerp_(tensors, currents, weight)
            continue
        for average, current in zip(tensors, currents, strict=True):
            lerp_one_(average, current, weight)


def lerp_one_(average: Tensor, current: Tensor, weight: Weight) -> None:
    """Move one average, in place.

    Args:
        average: The average.
        current: The current value, of any dtype and device.
        weight: How far it moves. A tensor in device memory is not read on the host.
    """
    current = current.to(average.device, average.dtype)
    if not isinstance(weight, Tensor):
        average.lerp_(current, weight)
        return
    # Kernels that take the weight as a number compute 16-bit tensors in float32: so do these bits.
    wide = torch.promote_types(average.dtype, torch.float32)
    average.copy_(torch.lerp(average.to(wide), current.to(wide), weight.to(wide)))


def where_(flag: Tensor, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors other values, in place, where a flag is True.

    The flag is in device memory and is not read on the host.

    Args:
        flag: A tensor of one bool.
        tensors: The tensors.
        values: Their other values, of any dtype and device.
    """
    for tensor, value in zip(tensors, values, strict=True):
        torch.where(flag, value.to(tensor.device, tensor.dtype), tensor, out=tensor)


def _moved(tensors: list[Tensor], scratch: Tensor) -> list[Tensor]:
    """Cast or move tensors into memory that is used again, which is several times faster."""
    numel = sum(tensor.numel() for tensor in tensors)
    if numel > scratch.numel() or type(tensors[0]) not in PLAIN:
        return [tensor.to(scratch.device, scratch.dtype) for tensor in tensors]
    views = _views(scratch[:numel], tensors)
    copy_all_(views, tensors)
    return views


def _views(memory: Tensor, likes: list[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor, one after the other, with the shapes of other tensors."""
    # Dynamo does not know the function, and traces tensors one by one.
    return [memory.view(likes[0].shape)] if len(likes) == 1 else [*unflatten(memory, likes)]


def gathered(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Copy parallel lists of tensors to one tensor each, where that saves launches of kernels.

    Gathering a list is one launch on an accelerator that has kernels for lists, and steps without
    such kernels then take one launch for all tensors.

    Args:
        lists: Lists of equal length, each of one device and dtype. Tensors at the same place have
            the same shape.

    Returns:
        For each list, a list of one flat tensor; or the lists themselves, if they have one tensor,
        if the tensors are on devices without such kernels, or have arithmetic of their own.
    """
    kernels = foreach_devices()
    saves = all(of[0].device.type in kernels and PLAIN.issuperset(map(type, of)) for of in lists)
    return [[flatten(of)] for of in lists] if saves and len(lists[0]) > 1 else list(lists)


def in_parts(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield the :func:`parts` of parallel lists of tensors to compute with, :func:`gathered`.

    What is computed in all but the last list is copied back.
    """
    for part in parts(*lists):
        taken = gathered(*part)
        yield taken
        for tensors, source in zip(part[:-1], taken[:-1], strict=True):
            if source is not tensors:
                copy_all_(tensors, _views(source[0], tensors))


def _chunk_for(tensor: Tensor) -> int:
    return CHUNK if tensor.device.type in HOST_DEVICES else DEVICE_CHUNK


def parts(*lists: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Cut parallel lists of tensors into parts, which bounds the memory of temporaries.

    Small tensors are batched, large ones are cut into flat views if they are contiguous, and those
    without elements are left out.

    Args:
        lists: Lists of equal length, which is not 0. Tensors at the same place have the same shape,
            and temporaries are on the device of the first list.

    Yields:
        For each part, a list of tensors for each of ``lists``, of at most ``CHUNK`` elements, or
        ``DEVICE_CHUNK`` on an accelerator; a large tensor that is not contiguous is a part of its
        own.
    """
    chunk = _chunk_for(lists[0][0])
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for row in zip(*lists, strict=True):
        elements = row[0].numel()
        if not elements:
            # There is nothing to compute, and ``unflatten`` of torch 2.8 drops the shape.
            continue
        if elements > chunk and all(tensor.is_contiguous() for tensor in row):
            flat = [tensor.detach().view(-1) for tensor in row]
            for start in range(0, elements, chunk):
                yield tuple([tensor[start : start + chunk]] for tensor in flat)
            continue

        if batch and size + elements > chunk:
            yield tuple(map(list, zip(*batch, strict=True)))
            batch = []
            size = 0
        batch.append(row)
        size += elements
    if batch:
        yield tuple(map(list, zip(*batch, strict=True)))


def stochastic_(
    averages: list[Tensor], currents: list[Tensor], weight: Weight, generator: torch.Generator
) -> None:
    """Move 16-bit averages in place, computed in float32 and rounded stochastically.

    A value is rounded away from zero with the probability of the part that rounding towards zero
    would cut off, so the rounding errors of many steps cancel. See
    https://arxiv.org/abs/1502.02551, section 3.1.

    Args:
        averages: Averages in bfloat16 or float16.
        currents: Current values, of any dtype and device.
        weight: How far each average moves.
        generator: Source of the random bits, which may be on another device.
    """
    # Random low-order bits are added, and carry into the others with that probability. Then the
    # low-order bits are cut off: in two's complement, -(1 << cut) has all bits set but those.
    cut = ROUNDED[averages[0].dtype]
    for targets, values in in_parts(averages, currents):
        noise = _random_bits(sum(target.numel() for target in targets), cut, generator)
        pieces = noise.split([target.numel() for target in targets])
        for average, current, piece in zip(targets, values, pieces, strict=True):
            wide = average.float()
            lerp_one_(wide, current, weight)
            bits = wide.view(torch.int32).add_(piece.to(wide.device).view(wide.shape))
            average.copy_(bits.bitwise_and_(-(1 << cut)).view(torch.float32))


def _random_bits(elements: int, count: int, generator: torch.Generator) -> Tensor:
    """Return integers of up to 16 random bits."""
    # Drawing takes most of the time of a step, and one draw of 64 bits is enough for four integers.
    draws = torch.empty(-(-elements // 4), dtype=torch.int64, device=generator.device)
    draws.random_(-(1 << 63), None, generator=generator)
    return draws.view(torch.int16)[:elements].to(torch.int32).bitwise_and_((1 << count) - 1)


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all elements are finite, as a tensor on the device: no host sync.

    On CPU, where reading is free, a finite sum proves it, at a third of the time of a ``lerp_``. A
    sum may also overflow, and only then are the elements of that tensor tested.

    Args:
        tensors: Tensors of any dtypes and devices.

    Returns:
        A tensor of one bool, on the device of the first tensor.
    """
    real = [_as_real(tensor) for tensor in tensors if tensor.numel()]
    if all(tensor.device.type in HOST_DEVICES for tensor in real):
        return torch.tensor(all(map(_has_finite_elements, real)), device="cpu")

    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in real:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    # The largest magnitude is NaN if any element is.
    largest = [torch.stack(foreach_norm(group, math.inf)) for group in groups.values()]
    return torch.stack([norms.isfinite().all().to(real[0].device) for norms in largest]).all()


def _has_finite_elements(tensor: Tensor) -> bool:
    # A sum in float16 overflows from 65,504 on.
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    if math.isfinite(total):
        return True
    return all(bool(view.isfinite().all()) for (views,) in parts([tensor]) for view in views)


def _as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def first_nonfinite(tensors: Mapping[str, Tensor], process_group: Any = None) -> str | None:
    """Return the first name with elements that are not finite. This is a host sync.

    Of sharded tensors it tests the local shards; ranks that share tensors agree on the result.
    """
    local = {name: local_shard(tensor) for name, tensor in tensors.items()}
    name_here = None
    if not bool(all_finite([*local.values()])):
        name_here = next((name for name in local if not bool(all_finite([local[name]]))), None)

    # All ranks must take the same way: one that raised alone would leave the others waiting.
    flag = torch.tensor(name_here is None, device="cpu")
    if true_everywhere(flag, groups_of(tensors.values(), process_group)):
        return None
    return name_here or "a parameter on another rank"


def check_finite(owner: str, tensors: Mapping[str, Tensor], process_group: Any = None) -> None:
    """Check that all values are finite. This is a host sync.

    Args:
        owner: The class that averages, with which the error begins.
        tensors: Tensors by name.
        process_group: The ranks that agree. Default: those that share the tensors.

    Raises:
        RuntimeError: If a value is not finite. It names the first tensor.
    """
    name = first_nonfinite(tensors, process_group)
    if name is not None:
        raise RuntimeError(f"{owner}: {name} is not finite. Nothing has been changed.")


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor that has its storage to itself: a file would hold all of a shared one.

    Args:
        tensor: The tensor.

    Returns:
        The tensor, or a copy of it if its storage is larger than it is.
    """
    tensor = tensor.contiguous()
    # An empty view has the address of what follows it, which torch.save takes for a shared storage.
    alone = tensor.nbytes and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()
