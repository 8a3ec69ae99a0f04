"""Weight averaging, equal (SWA) and exponential (EMA): drop-in for ``torch.optim.swa_utils``.

``SWALR`` is torch's own class.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import SWALR

from modkit._namespace import publish_all
from modkit._upstream import BatchNormBase
from modkit.averaging.precision import TensorList
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

    It computes ``decay * average + (1 - decay) * current`` in place, with fused kernels. A decay
    outside [0, 1] raises ValueError.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_ema_multi_avg_fn(0.75)(averaged, current, 1)
        >>> averaged
        [tensor([1.2500])]

    Differs from torch: the function can be pickled and shows its decay.
    """
    return AveragingFunction("get_ema_multi_avg_fn", decay)


def get_swa_multi_avg_fn() -> MultiAvgFn:
    """Return the equal average of lists of tensors, a ``multi_avg_fn``; it works in place, and can be pickled."""
    return AveragingFunction("get_swa_multi_avg_fn")


def get_ema_avg_fn(decay: float = 0.999) -> AvgFn:
    """Return the exponential moving average of one tensor, an ``avg_fn`` that can be pickled."""
    return AveragingFunction("get_ema_avg_fn", decay)


def get_swa_avg_fn() -> AvgFn:
    """Return the equal average of one tensor, an ``avg_fn`` that can be pickled."""
    return AveragingFunction("get_swa_avg_fn")


def update_bn(
    loader: Iterable[Any], model: torch.nn.Module, device: int | torch.device | None = None
) -> None:
    """Compute the batch normalization statistics of a model afresh, in one pass over the data.

    Call it on an ``AveragedModel`` before evaluation: no training step has seen the activations of
    averaged weights. An empty loader raises ValueError.

    Args:
        loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
        model: Model whose statistics are replaced.
        device: Device that inputs are moved to.

    Example:
        >>> import torch
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, update_bn
        >>> average = AveragedModel(nn.BatchNorm1d(1))
        >>> update_bn([torch.tensor([[2.0], [4.0]])], average)

    Differs from torch: only batch normalization runs in training mode, each module gets its own
    mode back, and if anything raises, the model is as before.
    """
    layers: list[Any] = [one for one in model.modules() if isinstance(one, BatchNormBase)]
    if not layers:
        return
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    names = "running_mean", "running_var", "num_batches_tracked"
    found = (getattr(layer, name) for layer in layers for name in names)
    saved = [(one, one.clone()) for one in found if one is not None and not is_lazy(one)]
    with torch.no_grad():
        try:
            for layer in layers:
                layer.reset_running_stats()
                # Without a momentum, the layer keeps the mean over all batches.
                layer.momentum = None
            # By attribute: ``train()`` may be overridden to freeze layers.
            for module, _ in modes:
                module.training = isinstance(module, BatchNormBase)
            _run(loader, model, device)
        except BaseException:
            for tensor, value in saved:
                tensor.copy_(value)
            raise
        finally:
            for module, training in modes:
                module.training = training
            for layer, momentum in momenta:
                layer.momentum = momentum


def _run(loader: Iterable[Any], model: torch.nn.Module, device: int | torch.device | None) -> None:
    empty = True
    for batch in loader:
        inputs: Any = batch[0] if isinstance(batch, (list, tuple)) else batch
        model(inputs if device is None else inputs.to(device))
        empty = False
    if empty:
        raise ValueError("update_bn: the loader is empty, so there are no statistics to compute")


publish_all(globals())
