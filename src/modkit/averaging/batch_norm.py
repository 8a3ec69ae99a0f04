"""Batch normalization statistics, computed afresh for weights that no training step has seen."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modkit._upstream import BatchNormBase
from modkit.averaging.named_tensors import NamedTensors


_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def layers_of(model: torch.nn.Module) -> list[Any]:
    """Return the batch normalization layers of a model."""
    return [one for one in model.modules() if isinstance(one, BatchNormBase)]


def statistics_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the statistics of all batch normalization layers by canonical name."""
    tables = {id(layer._buffers) for layer in layers_of(model)}
    return {
        name: member.current()
        for name, member in NamedTensors(model).buffers.items()
        if id(member.registry) in tables and member.key in _STATISTICS
    }


def recompute(
    loader: Iterable[Any], model: torch.nn.Module, device: int | str | torch.device | None = None
) -> None:
    """Replace the statistics of a model by those of the data; if anything raises, it is as before.

    Only batch normalization runs in training mode, and each module gets its own mode back.
    """
    layers = layers_of(model)
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    found = (getattr(layer, name) for layer in layers for name in _STATISTICS)
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


def _run(
    loader: Iterable[Any], model: torch.nn.Module, device: int | str | torch.device | None
) -> None:
    empty = True
    for batch in loader:
        inputs: Any = batch[0] if isinstance(batch, (list, tuple)) else batch
        model(inputs if device is None else inputs.to(device))
        empty = False
    if empty:
        raise ValueError("update_bn: the loader is empty, so there are no statistics to compute")
