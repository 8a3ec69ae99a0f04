"""In what numbers an average is kept, and one step of it in each of these ways.

An average moves by a small part of a small difference. In the number format of the weights that
part is often below the last digit, and the average stands still: bfloat16 does so from a decay of
0.99 on, float32 from about 0.99999 on.

==============  =====================================================================================
``precision``   how the average is kept
==============  =====================================================================================
same            as the parameter is
fp32            in float32 at least (float64 stays)
fp64            in float64
stochastic      as the parameter is; a step that falls between two numbers goes to one of them at
                random, so that it is right on average (bfloat16 and float16; the rest as ``fp32``)
compensated     as the parameter is, with a second number of that kind for what does not fit
==============  =====================================================================================
"""

from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from modkit._upstream import foreach_lerp_


Precision: TypeAlias = Literal["same", "fp32", "fp64", "stochastic", "compensated"]
PRECISIONS: Final = get_args(Precision)

# Elements that are cast at a time: more would not stay in the cache, and from 32,768 on torch would
# start its threads.
_CHUNK: Final = 16_384

# For each 16-bit type that can be rounded to by cutting off bits of a float32: how many.
ROUNDED: Final = {torch.bfloat16: 16, torch.float16: 13}

# The types that are calculated with in float32.
NARROW: Final = (torch.bfloat16, torch.float16)


def is_averaged(tensor: Tensor) -> bool:
    """Tell whether averages of such a tensor exist: integers and booleans have none."""
    return tensor.is_floating_point() or tensor.is_complex()


def kept_dtype(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """Return the dtype in which the average of a tensor of ``dtype`` is kept."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    wide = torch.float64 if precision == "fp64" else torch.float32
    if dtype.is_floating_point and dtype.itemsize == 1:
        # No arithmetic exists in 8 bits.
        return wide
    if precision == "same" or (precision == "compensated" and dtype != torch.complex32):
        return dtype
    if precision == "stochastic" and dtype in ROUNDED:
        return dtype
    return torch.promote_types(dtype, wide)


def lerp_(averages: list[Tensor], currents: list[Tensor], weight: float) -> None:
    """Move each average by ``weight`` of the way to the current value, in place.

    Args:
        averages: Averages, all of one device and dtype.
        currents: Current values, all of one device and dtype, perhaps not those of the averages.
        weight: How much of the way; 1 copies.
    """
    if weight == 1.0:
        for average, current in zip(averages, currents, strict=True):
            average.copy_(current)
        return
    average, current = averages[0], currents[0]
    if average.dtype == current.dtype and average.device == current.device:
        # Nothing is made here, and autograd takes a tenth of the time of small tensors.
        with torch.inference_mode():
            foreach_lerp_(averages, currents, weight)
        return
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for average, current in zip(averages, currents, strict=True):
        if average.numel() <= _CHUNK or average.device != current.device:
            small[0].append(average)
            small[1].append(current.to(average.device, average.dtype))
        else:
            _lerp_in_chunks_(average, current, weight)
    if small[0]:
        foreach_lerp_(*small, weight)


def _lerp_in_chunks_(average: Tensor, current: Tensor, weight: float) -> None:
    if not (average.is_contiguous() and current.is_contiguous()):
        average.lerp_(current.to(average.dtype), weight)
        return
    flat, source = average.view(-1), current.detach().view(-1)
    scratch = torch.empty(_CHUNK, dtype=average.dtype, device=average.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        cast = scratch[: part.numel()]
        cast.copy_(source[start : start + _CHUNK])
        part.lerp_(cast, weight)


def lerp_stochastic_(
    averages: list[Tensor],
    currents: list[Tensor],
    weight: float,
    generator: torch.Generator,
) -> None:
    """Do the same, and round what does not fit into 16 bits up or down at random."""
    for average, current in zip(averages, currents, strict=True):
        wide = average.float().lerp_(current.to(average.device, torch.float32), weight)
        cut = ROUNDED[average.dtype]
        noise = torch.randint(
            1 << cut, wide.shape, dtype=torch.int32, device=wide.device, generator=generator
        )
        bits = wide.view(torch.int32).add_(noise).bitwise_and_(-(1 << cut))
        average.copy_(bits.view(torch.float32))


def lerp_compensated_(
    averages: list[Tensor], rests: list[Tensor], currents: list[Tensor], weight: float
) -> None:
    """Do the same with the exact sum of two numbers, the second of which is what did not fit.

    It is Kahan's summation (https://doi.org/10.1145/363707.363723), one step at a time.
    """
    for average, rest, current in zip(averages, rests, currents, strict=True):
        if weight == 1.0:
            average.copy_(current)
            rest.zero_()
            continue
        target = current.to(average.device, average.dtype)
        if average.dtype in NARROW:
            wide = average.float().add_(rest)
            wide.lerp_(target.float(), weight)
            average.copy_(wide)
            rest.copy_(wide.sub_(average))
            continue
        step = (target - average).sub_(rest).mul_(weight).add_(rest)
        total = average + step
        rest.copy_(step.sub_(total - average))
        average.copy_(total)


def whole_value(average: Tensor, rest: Tensor | None) -> Tensor:
    """Return the value of an average, with the second number where there is one that matters."""
    if rest is None or average.dtype not in NARROW:
        return average
    return average.float().add_(rest)
