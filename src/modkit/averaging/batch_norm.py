"""Batch normalization statistics, computed afresh for weights that no training step has seen."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modkit._interrupts import uninterrupted
from modkit._upstream import BatchNormBase
from modkit.averaging.tensors import NamedTensors


_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def layers_of(model: torch.nn.Module) -> list[Any]:
    """Return the batch normalization layers of a model."""
    return [module for module in model.modules() if isinstance(module, BatchNormBase)]


def statistics_of(named: NamedTensors) -> dict[str, Tensor]:
    """Return running means, variances and counts of batch normalization by name; not copied."""
    layers = (module for module in named.modules if isinstance(module, BatchNormBase))
    tables = {id(layer._buffers) for layer in layers}
    statistics: dict[str, Tensor] = {}
    for name, member in named.buffers.items():
        # A class derived from batch normalization may have further buffers.
        if id(member.registry) in tables and member.key in _STATISTICS:
            statistics[name] = member.current()
    return statistics


def recompute(
    loader: Iterable[Any],
    model: torch.nn.Module,
    device: int | str | torch.device | None = None,
    call: Callable[[Any, Any], object] | None = None,
) -> None:
    """Replace the statistics of a model by those of the data, or leave all as before."""
    # Only batch normalization runs in training mode, and each module gets its own mode back.
    if call is not None and device is not None:
        raise ValueError("update_bn: device is for the default call; move the batches in call()")

    def call_with_inputs(model: Any, batch: Any) -> None:
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        model(inputs if device is None else inputs.to(device))

    forward = call or call_with_inputs
    layers = layers_of(model)
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    statistics = (getattr(layer, name) for layer in layers for name in _STATISTICS)
    saved = [(t, t.clone()) for t in statistics if t is not None and not is_lazy(t)]

    # Not by ``no_grad``, whose end a signal can prevent.
    records = torch.is_grad_enabled()

    def end() -> None:
        with uninterrupted():
            torch.set_grad_enabled(False)
            for tensor, value in saved:
                tensor.copy_(value)
            for module, training in modes:
                module.training = training
            for layer, momentum in momenta:
                layer.momentum = momentum
            torch.set_grad_enabled(records)

    try:
        try:
            torch.set_grad_enabled(False)
            for layer in layers:
                layer.reset_running_stats()
                # Without a momentum, the layer keeps the mean over all batches.
                layer.momentum = None
            # By attribute: ``train()`` may be overridden to freeze layers.
            for module, _ in modes:
                module.training = isinstance(module, BatchNormBase)

            is_empty = True
            for batch in loader:
                is_empty = False
                forward(model, batch)
            if is_empty:
                raise ValueError(
                    "update_bn: the loader is empty, so there are no statistics to compute"
                )
            saved = []
        finally:
            end()
    finally:
        # This completes what a signal has interrupted, and otherwise has no effect.
        end()
