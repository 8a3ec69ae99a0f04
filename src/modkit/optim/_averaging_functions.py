"""The averaging functions that ``modkit.optim.swa_utils`` returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast

import torch
from torch import Tensor

from modkit._upstream import foreach_add_, foreach_addcdiv_, foreach_lerp_, foreach_sub
from modkit.averaging.named_tensors import is_averaged
from modkit.averaging.precision import TensorList, Weight


PARAM_LIST: TypeAlias = TensorList
AvgFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | int], Tensor]
MultiAvgFn: TypeAlias = Callable[[TensorList, TensorList, Tensor | int], None]


# The two rules of averaging in torch's forms, so that results are bitwise identical to torch's.


def ema_of(averaged: Tensor, current: Tensor, decay: float) -> Tensor:
    """Return one step of the exponential average of a tensor."""
    return decay * averaged + (1 - decay) * current


def swa_of(averaged: Tensor, current: Tensor, count: Weight) -> Tensor:
    """Return the mean of ``count`` averaged values and the current one."""
    return averaged + (current - averaged) / (count + 1)


def ema_(averaged: TensorList, current: TensorList, decay: float) -> None:
    """Take one step of the exponential average, in place, for tensors of one dtype and device."""
    if is_averaged(averaged[0]):
        foreach_lerp_(averaged, current, 1 - decay)
        return
    for target, source in zip(averaged, current, strict=True):
        target.copy_(target * decay + source * (1 - decay))


def swa_(averaged: TensorList, current: TensorList, count: Weight) -> None:
    """Take one step of the equal average, in place, for tensors of one dtype and device."""
    if is_averaged(averaged[0]):
        foreach_lerp_(averaged, current, cast("float", 1 / (count + 1)))
        return
    differences = foreach_sub(current, averaged)
    if isinstance(count, Tensor):
        foreach_addcdiv_(averaged, differences, [count + 1] * len(averaged))
    else:
        foreach_add_(averaged, differences, alpha=1.0 / (count + 1))


def get_ema_multi_avg_fn(decay: float = 0.999) -> MultiAvgFn:
    """Return the exponential moving average, for lists of tensors.

    Use it as ``multi_avg_fn`` of ``AveragedModel``; it is the faster of the two forms. A step makes
    the average ``decay * average + (1 - decay) * current``.

    Args:
        decay: How much of the average stays in each step, from 0 to 1.

    Returns:
        A function of the averaged tensors, the current tensors and the number of models averaged
        so far. It writes the first list in place; the tensors of a call share a device and a dtype.

    Raises:
        ValueError: ``decay`` is below 0 or above 1.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_ema_multi_avg_fn(0.75)(averaged, current, 1)
        >>> averaged
        [tensor([1.2500])]

    Differs from torch: the function can be pickled and shows its decay.
    """
    _check_decay(decay)
    return MultiEMA(decay)


def get_swa_multi_avg_fn() -> MultiAvgFn:
    """Return the equal average of all models seen, for lists of tensors.

    It is what ``AveragedModel`` uses by itself on accelerators. With ``n`` models averaged so far,
    a step moves the average by ``1 / (n + 1)`` of the way to the current value.

    Returns:
        A function of the averaged tensors, the current tensors and the number of models averaged
        so far. It writes the first list in place; the tensors of a call share a device and a dtype.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_swa_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_swa_multi_avg_fn()(averaged, current, 3)
        >>> averaged
        [tensor([1.2500])]

    Differs from torch: the function can be pickled.
    """
    return MultiSWA()


def get_ema_avg_fn(decay: float = 0.999) -> AvgFn:
    """Return the exponential moving average, for one tensor.

    Use it as ``avg_fn`` of ``AveragedModel`` where lists of tensors do not work, or as the base of
    an own function. A step returns ``decay * average + (1 - decay) * current``.

    Args:
        decay: How much of the average stays in each step, from 0 to 1.

    Returns:
        A function of the averaged tensor, the current tensor and the number of models averaged so
        far, which returns the new average.

    Raises:
        ValueError: ``decay`` is below 0 or above 1.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_avg_fn
        >>> get_ema_avg_fn(0.75)(torch.tensor([1.0]), torch.tensor([2.0]), 1)
        tensor([1.2500])

    Differs from torch: the function can be pickled and shows its decay.
    """
    _check_decay(decay)
    return EMA(decay)


def get_swa_avg_fn() -> AvgFn:
    """Return the equal average of all models seen, for one tensor.

    It is what ``AveragedModel`` uses by itself on the CPU. With ``n`` models averaged so far, a
    step returns the average, moved by ``1 / (n + 1)`` of the way to the current value.

    Returns:
        A function of the averaged tensor, the current tensor and the number of models averaged so
        far, which returns the new average.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_swa_avg_fn
        >>> get_swa_avg_fn()(torch.tensor([1.0]), torch.tensor([2.0]), 3)
        tensor([1.2500])

    Differs from torch: the function can be pickled.
    """
    return SWA()


def _check_decay(decay: float) -> None:
    """Refuse a decay outside of [0, 1] in torch's words."""
    if decay < 0.0 or decay > 1.0:
        message = f"Invalid decay value {decay} provided. Please provide a value in [0,1] range."
        raise ValueError(message)


# The four functions are objects, because a closure has no name that pickle could find. Each pickles
# as a call of the public function that made it, so that these classes may move or be renamed.
@dataclass(frozen=True)
class MultiEMA:
    """Exponential averaging of lists."""

    decay: float
    modkit_rule: ClassVar = "ema"

    def __call__(
        self, ema_param_list: PARAM_LIST, current_param_list: PARAM_LIST, _: Tensor | int
    ) -> None:
        with torch.no_grad():
            ema_(ema_param_list, current_param_list, self.decay)

    def __reduce__(self) -> tuple[Callable[[float], MultiAvgFn], tuple[float]]:
        return get_ema_multi_avg_fn, (self.decay,)


@dataclass(frozen=True)
class MultiSWA:
    """Equal averaging of lists."""

    modkit_rule: ClassVar = "swa"

    def __call__(
        self,
        averaged_param_list: PARAM_LIST,
        current_param_list: PARAM_LIST,
        num_averaged: Tensor | int,
    ) -> None:
        with torch.no_grad():
            swa_(averaged_param_list, current_param_list, num_averaged)

    def __reduce__(self) -> tuple[Callable[[], MultiAvgFn], tuple[()]]:
        return get_swa_multi_avg_fn, ()


@dataclass(frozen=True)
class EMA:
    """Exponential averaging of one tensor."""

    decay: float

    def __call__(
        self, ema_param: Tensor, current_param: Tensor, num_averaged: Tensor | int
    ) -> Tensor:
        del num_averaged
        with torch.no_grad():
            return ema_of(ema_param, current_param, self.decay)

    def __reduce__(self) -> tuple[Callable[[float], AvgFn], tuple[float]]:
        return get_ema_avg_fn, (self.decay,)


@dataclass(frozen=True)
class SWA:
    """Equal averaging of one tensor."""

    def __call__(
        self, averaged_param: Tensor, current_param: Tensor, num_averaged: Tensor | int
    ) -> Tensor:
        with torch.no_grad():
            return swa_of(averaged_param, current_param, num_averaged)

    def __reduce__(self) -> tuple[Callable[[], AvgFn], tuple[()]]:
        return get_swa_avg_fn, ()
