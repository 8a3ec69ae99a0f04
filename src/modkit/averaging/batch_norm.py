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
    return [module for module in model.modules() if isinstance(module, BatchNormBase)]


def statistics_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the statistics of all batch normalization layers by canonical name.

    Args:
        model: The model.

    Returns:
        Running means and variances, and counts of batches; not copied.
    """
    tables = {id(layer._buffers) for layer in layers_of(model)}
    statistics: dict[str, Tensor] = {}
    for name, member in NamedTensors(model).buffers.items():
        # A class derived from batch normalization may have further buffers.
        if id(member.registry) in tables and member.key in _STATISTICS:
            statistics[name] = member.current()
    return statistics


class _WeightedMean:
    """The statistics of one layer: means over batches, weighted by the number of samples of each.

    The layer computes the statistics of one batch at a time, as ever: with its own kernel, in
    compiled code, and as a mean over its calls if it is called several times. A batch in which it
    is not called has no weight. Nothing is read on the host.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        # A mean over thousands of batches needs more bits than 16-bit statistics have.
        self._dtype = torch.promote_types(layer.running_mean.dtype, torch.float32)
        statistics = layer.running_mean, layer.running_var
        self._means = [(tensor, tensor.to(self._dtype, copy=True)) for tensor in statistics]
        self._calls: Tensor = layer.num_batches_tracked.clone()
        self._samples: Tensor = torch.zeros_like(self._calls)

    def add(self, samples: int) -> None:
        """Take in the statistics that the layer has computed, and reset it for the next batch."""
        calls = self._layer.num_batches_tracked
        added = samples * calls.clamp(max=1)
        self._samples += added
        self._calls += calls

        # A running mean: the batch moves it by its share of all samples so far.
        weight = (added / self._samples.clamp(min=1)).to(self._dtype)
        for statistic, mean in self._means:
            mean.lerp_(statistic.to(self._dtype), weight)
        self._layer.reset_running_stats()

    def write(self) -> None:
        """Give the layer the means."""
        for statistic, mean in self._means:
            statistic.copy_(mean)
        self._layer.num_batches_tracked.copy_(self._calls)


def recompute(
    loader: Iterable[Any],
    model: torch.nn.Module,
    device: int | str | torch.device | None = None,
    *,
    weight_by_samples: bool = False,
) -> None:
    """Replace the statistics of a model by those of the data; if anything raises, it is as before.

    Only batch normalization runs in training mode, and each module gets its own mode back.

    Args:
        loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
        model: The model.
        device: Device that inputs are moved to. Default: they are not moved.
        weight_by_samples: Whether each batch is weighted by the first dimension of its input.

    Raises:
        TypeError: If ``weight_by_samples=True`` and the input of a batch is not a tensor with a
            first dimension.
        ValueError: If the loader is empty.
        Exception: Whatever the loader or the model raises.
    """
    layers = layers_of(model)
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    statistics = (getattr(layer, name) for layer in layers for name in _STATISTICS)
    saved = [(t, t.clone()) for t in statistics if t is not None and not is_lazy(t)]

    # Whatever raises in between, statistics, modes and momenta are put back.
    with torch.no_grad():
        try:
            for layer in layers:
                layer.reset_running_stats()
                # Without a momentum, the layer keeps the mean over all batches.
                layer.momentum = None
            # By attribute: ``train()`` may be overridden to freeze layers.
            for module, _ in modes:
                module.training = isinstance(module, BatchNormBase)

            means: list[_WeightedMean] = []
            if weight_by_samples:
                means = [_WeightedMean(x) for x in layers if x.running_mean is not None]
            _run(loader, model, device, means)
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
    loader: Iterable[Any],
    model: torch.nn.Module,
    device: int | str | torch.device | None,
    means: list[_WeightedMean],
) -> None:
    """Call the model with each batch, and take in the statistics of the layers in ``means``."""
    is_empty = True
    for batch in loader:
        inputs: Any = batch[0] if isinstance(batch, (list, tuple)) else batch
        samples = _samples_of(inputs) if means else 0
        model(inputs if device is None else inputs.to(device))
        for mean in means:
            mean.add(samples)
        is_empty = False

    if is_empty:
        raise ValueError("update_bn: the loader is empty, so there are no statistics to compute")
    for mean in means:
        mean.write()


def _samples_of(inputs: Any) -> int:
    if not isinstance(inputs, Tensor) or inputs.dim() == 0:
        raise TypeError(
            "update_bn: weight_by_samples=True takes the number of samples from the first "
            f"dimension of each batch, which must be a tensor, got {type(inputs).__name__}. "
            "Nothing has been changed."
        )
    return inputs.shape[0]
