"""The averaging functions that ``modkit.optim.swa_utils`` returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from modkit.averaging.precision import TensorList, ema_, ema_of, swa_, swa_of
from modkit.optim._averaged_model import AvgFn, MultiAvgFn


PARAM_LIST: TypeAlias = TensorList


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


for _function in (get_ema_multi_avg_fn, get_swa_multi_avg_fn, get_ema_avg_fn, get_swa_avg_fn):
    # Where users import them from, and where pickle finds them.
    _function.__module__ = "modkit.optim.swa_utils"
