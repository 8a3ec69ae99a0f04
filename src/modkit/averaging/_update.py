"""One step of an average, on tensors that are paired already.

Results are torch's to the last bit, so each function computes in the form that torch computes in:
``a + (b - a) / n``, ``lerp`` and ``w * a + (1 - w) * b`` are the same on paper and round differently.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, cast

import torch
from torch import Tensor

from modkit._upstream import foreach_add_, foreach_addcdiv_, foreach_lerp_, foreach_sub


TensorList: TypeAlias = tuple[Tensor, ...] | list[Tensor]
AvgFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | int], Tensor]
MultiAvgFn: TypeAlias = Callable[[TensorList, TensorList, Tensor | int], None]


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


def update_each(averaged: TensorList, current: TensorList, count: Tensor, avg_fn: AvgFn) -> None:
    """Update tensor by tensor with a function that returns the new value.

    Args:
        averaged: Tensors of the average, written in place.
        current: Values of the model, paired with ``averaged``.
        count: Number of models in the average; the function gets it on the tensor's device.
        avg_fn: Maps the averaged value, the current value and the count to the new average.
    """
    for target, source in zip(averaged, current, strict=True):
        target.copy_(avg_fn(target, source, count.to(target.device)))


def update_grouped(
    averaged: TensorList, current: TensorList, count: Tensor, multi_avg_fn: MultiAvgFn | None
) -> None:
    """Update all tensors of one device and dtype at a time.

    Args:
        averaged: Tensors of the average, written in place.
        current: Values of the model, paired with ``averaged``.
        count: Number of models in the average; the function gets it on the group's device.
        multi_avg_fn: Writes the new averages into its first list; ``None`` takes the equal average.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(averaged, current, strict=True):
        targets, sources = groups.setdefault((target.device, target.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    for (device, _), (targets, sources) in groups.items():
        if multi_avg_fn is not None:
            multi_avg_fn(targets, sources, count.to(device))
        elif _has_foreach_kernels(device):
            swa_(targets, sources, count.to(device))
        else:
            update_each(targets, sources, count, swa_of)


def copy_each(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy values pairwise, across devices and dtypes; the two must be equally many."""
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source.detach().to(target.device))


def _can_lerp(tensors: TensorList) -> bool:
    """Tell whether ``lerp`` takes this dtype: integers and booleans are left to slower ways."""
    return tensors[0].is_floating_point() or tensors[0].is_complex()


def _has_foreach_kernels(device: torch.device) -> bool:
    """Tell whether lists of tensors have fused kernels here; elsewhere torch goes one by one."""
    # An out-of-tree backend chooses its own name, which this spelling of its device type resolves.
    return device.type in {"cuda", "xpu", "mtia", torch.device("privateuseone").type}
