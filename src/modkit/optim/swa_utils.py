"""Weight averaging, equal (SWA) and exponential (EMA): drop-in for ``torch.optim.swa_utils``.

Call ``AveragedModel.update_parameters`` after each step of the optimizer (EMA) or at the end of
each epoch (SWA), and ``update_bn`` before the average is evaluated. ``SWALR`` is torch's own class.

Example:
    >>> import torch
    >>> from modkit import nn
    >>> from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    >>> for value in 1.0, 2.0:
    ...     _ = torch.nn.init.constant_(model.weight, value)
    ...     average.update_parameters(model)
    >>> average.module.weight.item(), average.n_averaged.item()
    (1.25, 2)
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.optim.swa_utils import SWALR

from modkit._namespace import publish_all
from modkit.averaging import batch_norm
from modkit.averaging.precision import TensorList
from modkit.averaging.swap import any_swapped
from modkit.optim._averaged_model import AveragedModel
from modkit.optim.averaging_functions import (
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)


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


def update_bn(
    loader: Iterable[Any],
    model: torch.nn.Module,
    device: int | torch.device | None = None,
    *,
    weight_by_samples: bool = False,
) -> None:
    """Compute the batch normalization statistics of a model afresh, in one pass over the data.

    Call it on an ``AveragedModel`` before evaluation: no training step has seen the activations of
    averaged weights.

    Args:
        loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
        model: Model whose statistics are replaced.
        device: Device that inputs are moved to.
        weight_by_samples: Whether batches are weighted by their number of samples.

    modkit: Only batch normalization runs in training mode, and each module gets its own mode back.
    If anything raises, the model is as before. For an ``EMA`` call ``ema.update_bn(loader)``.

    Keyword Args:
        weight_by_samples: Whether each batch ``b`` is weighted by its number of samples ``n_b``,
            the first dimension of the input, because the last batch of an epoch may be smaller.
            With the mean ``m_b`` and the unbiased variance ``v_b`` of a channel in the batch,
            ``running_mean`` is ``sum(n_b * m_b) / sum(n_b)``, the mean over all samples, and
            ``running_var`` is ``sum(n_b * v_b) / sum(n_b)``, the mean variance within a batch. With
            batches of one size these are the values of the default, the plain means over batches
            (https://arxiv.org/abs/1502.03167, algorithm 2), up to float rounding.

    Raises:
        TypeError: If ``weight_by_samples=True`` and the input of a batch is not a tensor with a
            first dimension.
        ValueError: If the loader is empty.
        RuntimeError: If an average is swapped into the model, as inside ``EMA.applied()``.

    Example:
        >>> import torch
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, update_bn
        >>> average = AveragedModel(nn.BatchNorm1d(1))
        >>> update_bn([torch.tensor([[2.0], [4.0]])], average)
        >>> uneven = [torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([[1.0], [9.0]])]
        >>> update_bn(uneven, average, weight_by_samples=True)
        >>> average.module.running_mean  # of five samples
        tensor([3.2000])
    """
    if not batch_norm.layers_of(model):
        return

    if any_swapped(model):
        raise RuntimeError(
            "update_bn() was called inside applied() or evaluating(): it would overwrite the "
            "statistics of the average. Call ema.update_bn(loader) outside of the block. Nothing "
            "has been changed."
        )

    batch_norm.recompute(loader, model, device, weight_by_samples=weight_by_samples)


publish_all(globals())
