"""One step of an average, on tensors that are paired already.

Results are torch's to the last bit, so each function computes in the form that torch computes in:
``a + (b - a) / n``, ``lerp`` and ``w * a + (1 - w) * b`` are the same on paper and round differently.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from modkit._upstream import foreach_add_, foreach_addcdiv_, foreach_lerp_, foreach_sub
from modkit.averaging._sharded import true_everywhere


TensorList: TypeAlias = tuple[Tensor, ...] | list[Tensor]
AvgFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | int], Tensor]
MultiAvgFn: TypeAlias = Callable[[TensorList, TensorList, Tensor | int], None]

# Bytes of a float32.
_SINGLE: Final = 4


def ema_of(averaged: Tensor, current: Tensor, decay: float) -> Tensor:
    """Return ``decay`` parts of the average with the rest taken from the current value."""
    return decay * averaged + (1 - decay) * current


def swa_of(averaged: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
    """Return the mean of ``count`` averaged values and the current one."""
    return averaged + (current - averaged) / (count + 1)


def ema_(averaged: TensorList, current: TensorList, decay: float) -> None:
    """Take one step of exponential averaging, in place, for a list of tensors of one dtype."""
    if _can_lerp(averaged):
        foreach_lerp_(averaged, current, 1 - decay)
        return
    for target, source in zip(averaged, current, strict=True):
        target.copy_(target * decay + source * (1 - decay))


def swa_(averaged: TensorList, current: TensorList, count: Tensor | int) -> None:
    """Take one step of equal averaging, in place, for a list of tensors of one dtype."""
    if _can_lerp(averaged):
        weight = cast("float", 1 / (count + 1))
        foreach_lerp_(averaged, current, weight)
        return
    differences = foreach_sub(current, averaged)
    if isinstance(count, Tensor):
        counts = [count + 1] * len(averaged)
        foreach_addcdiv_(averaged, differences, counts)
    else:
        foreach_add_(averaged, differences, alpha=1.0 / (count + 1))


class Group(Protocol):
    """Tensors of an average, all of one device and dtype, with what belongs to them in the model."""

    targets: list[Tensor]
    sources: list[Tensor]
    uniform: bool


def step_(
    groups: Sequence[Group],
    count: int,
    counter: Tensor,
    avg_fn: AvgFn | None,
    multi_avg_fn: MultiAvgFn | None,
) -> None:
    """Take one step of an average that has begun, in place.

    Args:
        groups: The tensors.
        count: Number of models in the average.
        counter: The same as a tensor, of which users' functions get a copy.
        avg_fn: Maps the averaged value, the current value and the count to the new average.
        multi_avg_fn: Writes the new averages into its first list, and comes first. Without either
            function the average is the equal one.
    """
    for group in groups:
        if multi_avg_fn is None and avg_fn is not None:
            _step_each_(group, counter, avg_fn)
            continue
        weight = _weight(multi_avg_fn, count, group.targets[0].device)
        if weight is not None:
            with torch.no_grad():
                _lerp_group_(group, weight)
        elif multi_avg_fn is not None:
            _step_lists_(group, counter, multi_avg_fn)
        else:
            with torch.no_grad():
                _swa_group_(group, count)


def step_traced_(
    groups: Sequence[Group],
    counter: Tensor,
    avg_fn: AvgFn | None,
    multi_avg_fn: MultiAvgFn | None,
) -> None:
    """Take a first or a later step, in operations that can be compiled: nothing asks the count."""
    first = counter == 0
    for group in groups:
        device = group.targets[0].device
        targets = [target.detach() for target in group.targets]
        sources = [source.detach().to(device) for source in group.sources]
        count = counter.to(device, copy=True)
        weight = _weight(multi_avg_fn, counter, device)
        own = multi_avg_fn is None and avg_fn is not None
        if multi_avg_fn is not None and weight is None:
            multi_avg_fn(targets, sources, count)
        for target, source in zip(targets, sources, strict=True):
            if avg_fn is not None and own:
                value = avg_fn(target, source, count)
            elif weight is not None:
                value = torch.lerp(target, source.to(target.dtype), cast("float", weight))
            elif multi_avg_fn is not None:
                value = target
            else:
                value = swa_of(target, source, count)
            target.copy_(torch.where(first.to(device), source.to(value.dtype), value))


@dataclass
class _Masked:
    """A group with other sources."""

    targets: list[Tensor]
    sources: list[Tensor]
    uniform: bool


def masked_sources(groups: Sequence[Group], meshes: Sequence[Any]) -> list[Group]:
    """Return the groups with the averages themselves as sources if any source is not finite.

    It is decided on the device. A step towards itself leaves an average as it is. The processes of
    the meshes, which have shards of one model, decide together.
    """
    checks = [
        torch.isfinite(_widened(source)).all() for group in groups for source in group.sources
    ]
    if not checks:
        return list(groups)
    finite = torch.stack([check.to(checks[0].device) for check in checks]).all()
    finite = true_everywhere(finite, meshes)
    masked: list[Group] = []
    for group in groups:
        device = group.targets[0].device
        good = finite.to(device)
        sources = [
            torch.where(good, source.detach().to(device), target.detach().to(source.dtype))
            for target, source in zip(group.targets, group.sources, strict=True)
        ]
        masked.append(_Masked(group.targets, sources, uniform=group.uniform))
    return masked


def _weight(
    multi_avg_fn: MultiAvgFn | None, count: Tensor | int, device: torch.device
) -> Tensor | float | None:
    """Return the part of the way that a rule of this library moves; None for other functions."""
    if multi_avg_fn is None:
        return swa_weight(count) if _has_foreach_kernels(device) else None
    weigh = getattr(multi_avg_fn, "lerp_weight", None)
    return None if weigh is None else cast("Tensor | float", weigh(count))


def swa_weight(count: Tensor | int) -> Tensor | float:
    """Return the part of the way to the next of ``count + 1`` equally weighted values.

    It is rounded as torch rounds it, which divides tensors of the default dtype.
    """
    if isinstance(count, Tensor):
        return 1 / (count + 1)
    size = torch.get_default_dtype().itemsize
    if size < _SINGLE:
        return (1 / torch.tensor(count + 1)).item()
    weight = 1 / (count + 1)
    if size == _SINGLE:
        (rounded,) = struct.unpack("f", struct.pack("f", weight))
        return float(rounded)
    return weight


def _lerp_group_(group: Group, weight: Tensor | float) -> None:
    if group.uniform and not _is_narrow(group.targets[0]):
        # Nothing is created here that could be left as a tensor of inference, and autograd takes a
        # tenth of the time of small tensors even where it has nothing to do.
        with torch.inference_mode():
            foreach_lerp_(group.targets, group.sources, cast("float", weight))
        return
    for target, source in zip(group.targets, group.sources, strict=True):
        wide = _widened(target)
        # The kernel takes one dtype alone.
        wide.lerp_(source.to(wide.device, wide.dtype), cast("float", weight))
        if wide is not target:
            target.copy_(wide)


def _swa_group_(group: Group, count: int) -> None:
    plain = group.uniform and not _is_narrow(group.targets[0])
    for target, source in zip(group.targets, group.sources, strict=True):
        if plain:
            target.add_(source.sub(target).div_(count + 1))
        else:
            current = _widened(source.to(target.device))
            target.copy_(swa_of(_widened(target), current, count))


def _step_each_(group: Group, counter: Tensor, avg_fn: AvgFn) -> None:
    device = group.targets[0].device
    for target, source in zip(group.targets, group.sources, strict=True):
        averaged, current = target.detach(), source.detach().to(device)
        count = counter.to(device, copy=True)
        averaged.copy_(avg_fn(_widened(averaged), _widened(current), count))


def _step_lists_(group: Group, counter: Tensor, multi_avg_fn: MultiAvgFn) -> None:
    device = group.targets[0].device
    targets = [target.detach() for target in group.targets]
    wide = [_widened(target) for target in targets]
    sources = [_widened(source.detach().to(device)) for source in group.sources]
    multi_avg_fn(wide, sources, counter.to(device, copy=True))
    for target, value in zip(targets, wide, strict=True):
        if value is not target:
            target.copy_(value)


def copy_each(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy values pairwise, across devices and dtypes; the two must be equally many."""
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source.detach().to(target.device))


def _can_lerp(tensors: TensorList) -> bool:
    """Tell whether ``lerp`` takes this dtype: integers and booleans are left to slower ways."""
    return tensors[0].is_floating_point() or tensors[0].is_complex()


def _is_narrow(tensor: Tensor) -> bool:
    """Tell whether a tensor has 8 bits or fewer, for which no arithmetic exists."""
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


def _widened(tensor: Tensor) -> Tensor:
    """Return a tensor that can be calculated with."""
    return tensor.float() if _is_narrow(tensor) else tensor


def _has_foreach_kernels(device: torch.device) -> bool:
    """Tell whether lists of tensors have fused kernels here; elsewhere torch goes one by one."""
    # An out-of-tree backend chooses its own name, which this spelling of its device type resolves.
    return device.type in {"cuda", "xpu", "mtia", torch.device("privateuseone").type}
