"""Weight averaging, equal (SWA) and exponential (EMA): drop-in for ``torch.optim.swa_utils``.

``AveragedModel`` keeps a running average of a model's weights, ``update_bn`` refreshes the batch
normalization statistics of the result, and ``SWALR`` is the learning-rate schedule that goes with
equal averaging. ``SWALR`` is torch's own class: schedulers belong to the optimizer, of which modkit
has no version.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.swa_utils import SWALR

from modkit.averaging._batch_norm import CallFn, norm_layers, update_statistics
from modkit.averaging._update import TensorList
from modkit.optim._averaged_model import AveragedModel
from modkit.optim._averaging_functions import (
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    call_fn: CallFn | None = None,
    max_batches: int | None = None,
    pooled: bool | None = None,
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Compute the batch normalization statistics of a model afresh, in one pass over the data.

    Averaged weights produce activations that no training step has seen: call this on an
    ``AveragedModel`` before it is evaluated. Every batch normalization layer, and every instance
    normalization layer with ``track_running_stats``, gets the statistics of the data. A model
    without such layers leaves the loader untouched.

    The layers concerned run in training mode and everything else in evaluation mode, so dropout is
    off. Each module has its own mode back afterwards. If anything fails, the loader included, the
    statistics are those of before.

    Args:
        loader: Yields batches: a tensor, or a list or tuple whose first element is what the model
            is called with. A mapping is taken for keyword arguments of the model.
        model: The model whose statistics are replaced.
        device: Where each batch is moved to before the call; by default it stays where it is.
        call_fn: Called with the model and the batch, all of it, for batches of other forms, such
            as ``lambda model, batch: model(batch["x"], mask=batch["mask"])``.
        max_batches: How many batches to use; by default all.
        pooled: True gives the mean and the variance of all samples together, however they are cut
            into batches. False gives the plain mean of the batches' means and variances. By
            default that is done where the batches are of one size, and samples are pooled where
            they are not. Layers in compiled code are never pooled.
        process_group: The processes that each see a part of the data, and are to end with the
            statistics of all of it (pooled). All of them must call this.

    Raises:
        ValueError: The loader is empty, or ``max_batches`` is below 1.

    Example:
        >>> import torch
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, update_bn
        >>> average = AveragedModel(nn.BatchNorm1d(1))
        >>> update_bn([torch.tensor([[2.0], [4.0]])], average)
        >>> average.module.running_mean, average.module.running_var
        (tensor([3.]), tensor([2.]))

    Differs from torch: batches of several sizes are pooled, only the layers concerned are in
    training mode, an error leaves the model as it was, and the keyword arguments are new.
    """
    if max_batches is not None and max_batches < 1:
        message = f"update_bn: max_batches must be at least 1, got {max_batches}"
        raise ValueError(message)
    if layers := norm_layers(model):
        update_statistics(
            layers,
            loader,
            model,
            device,
            call_fn=call_fn,
            max_batches=max_batches,
            pooled=pooled,
            process_group=process_group,
        )
