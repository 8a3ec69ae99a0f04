"""``update_bn``: batch normalization statistics of averaged weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modkit._upstream import BatchNormBase


def update_bn(
    loader: Iterable[Any], model: torch.nn.Module, device: int | torch.device | None = None
) -> None:
    """Compute the batch normalization statistics of a model afresh, in one pass over the data.

    Call it on an ``AveragedModel`` before evaluation: no training step has seen the activations of
    averaged weights. A model without batch normalization leaves the loader untouched.

    Args:
        loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
        model: Model whose statistics are replaced.
        device: Device that inputs are moved to.

    Raises:
        ValueError: If the loader is empty.

    Example:
        >>> import torch
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, update_bn
        >>> average = AveragedModel(nn.BatchNorm1d(1))
        >>> update_bn([torch.tensor([[2.0], [4.0]])], average)
        >>> average.module.running_mean
        tensor([3.])

    Differs from torch: only batch normalization runs in training mode, each module gets its own
    mode back, and if anything raises, the model is as before.
    """
    layers: list[Any] = [one for one in model.modules() if isinstance(one, BatchNormBase)]
    if not layers:
        return
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    saved = [(one, one.clone()) for layer in layers for one in _statistics(layer)]
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


# Where users import it from.
update_bn.__module__ = "modkit.optim.swa_utils"


def _run(loader: Iterable[Any], model: torch.nn.Module, device: int | torch.device | None) -> None:
    empty = True
    for batch in loader:
        inputs: Any = batch[0] if isinstance(batch, (list, tuple)) else batch
        model(inputs if device is None else inputs.to(device))
        empty = False
    if empty:
        raise ValueError("update_bn: the loader is empty, so there are no statistics to compute")


def _statistics(layer: Any) -> list[Tensor]:
    found = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    return [one for one in found if one is not None and not is_lazy(one)]
