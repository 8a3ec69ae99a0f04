"""Weight averaging, equal (SWA) and exponential (EMA): drop-in for ``torch.optim.swa_utils``.

``SWALR`` is torch's own class.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.optim.swa_utils import SWALR

from modkit._namespace import publish_all
from modkit.averaging import batch_norm
from modkit.averaging.precision import TensorList
from modkit.averaging.swap import any_swapped
from modkit.optim._averaged_model import AveragedModel, AveragingFunction, AvgFn, MultiAvgFn


__all__ = [
    "SWALR",
    "AveragedModel",
    "get_ema_avg_fn",
    "get_ema_multi_avg_fn",
    "get_swa_avg_fn",
    "get_swa_multi_avg_fn",
    "update_bn",
]

PARAM_LIST: TypeAlias = TensorList


def get_ema_multi_avg_fn(decay: float = 0.999) -> MultiAvgFn:
    """Return the exponential moving average of lists of tensors, a ``multi_avg_fn``.

    It computes ``decay * average + (1 - decay) * current`` in place, with fused kernels.

    modkit: The function can be pickled, and its ``repr`` shows the rule and the decay.

    Raises:
        ValueError: If ``decay`` is outside [0, 1].

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_ema_multi_avg_fn(0.75)(averaged, current, 1)
        >>> averaged
        [tensor([1.2500])]
    """
    return AveragingFunction("get_ema_multi_avg_fn", decay)


def get_swa_multi_avg_fn() -> MultiAvgFn:
    """Return the equal average of lists of tensors, a ``multi_avg_fn``, which works in place.

    modkit: The function can be pickled, and its ``repr`` shows the rule.
    """
    return AveragingFunction("get_swa_multi_avg_fn")


def get_ema_avg_fn(decay: float = 0.999) -> AvgFn:
    """Return the exponential moving average of one tensor, an ``avg_fn``.

    modkit: The function can be pickled, and its ``repr`` shows the rule and the decay.

    Raises:
        ValueError: If ``decay`` is outside [0, 1].
    """
    return AveragingFunction("get_ema_avg_fn", decay)


def get_swa_avg_fn() -> AvgFn:
    """Return the equal average of one tensor, an ``avg_fn``.

    modkit: The function can be pickled, and its ``repr`` shows the rule.
    """
    return AveragingFunction("get_swa_avg_fn")


def update_bn(
    loader: Iterable[Any], model: torch.nn.Module, device: int | torch.device | None = None
) -> None:
    """Compute the batch normalization statistics of a model afresh, in one pass over the data.

    Call it on an ``AveragedModel`` before evaluation: no training step has seen the activations of
    averaged weights.

    Args:
        loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
        model: Model whose statistics are replaced.
        device: Device that inputs are moved to.

    modkit: Only batch normalization runs in training mode, and each module gets its own mode back. If
    anything raises, the model is as before. For an ``EMA`` call ``ema.update_bn(loader)``.

    Raises:
        ValueError: If the loader is empty.
        RuntimeError: If an average is swapped into the model, as inside ``EMA.applied()``.

    Example:
        >>> import torch
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, update_bn
        >>> average = AveragedModel(nn.BatchNorm1d(1))
        >>> update_bn([torch.tensor([[2.0], [4.0]])], average)
    """
    if not batch_norm.layers_of(model):
        return
    if any_swapped(model):
        raise RuntimeError(
            "update_bn() was called inside applied() or evaluating(): it would overwrite the statistics "
            "of the average. Call ema.update_bn(loader) outside of the block. Nothing has been changed."
        )
    batch_norm.recompute(loader, model, device)


publish_all(globals())
