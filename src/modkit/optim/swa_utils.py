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

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

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

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
PARAM_LIST: TypeAlias = TensorList


def update_bn(
    loader: Iterable[Any],
    model: ModelT,
    device: int | torch.device | None = None,
    *,
    call: Callable[[ModelT, Any], object] | None = None,
) -> None:
    """Compute the batch normalization statistics of a model afresh, in one pass over the data.

    Call it on an ``AveragedModel`` before evaluation: no training step has seen the activations of
    averaged weights.

    Args:
        loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
        model: Model whose statistics are replaced.
        device: Device that inputs are moved to.
        call: Function that calls the model with a batch.

    modkit: Only batch normalization runs in training mode, and each module gets its own mode back.
    If anything raises, the model is as before. For an ``EMA`` call ``ema.update_bn(loader)``.

    Keyword Args:
        call: Function of the model and a batch that calls the model, for batches of keywords or
            several inputs, as in ``call=lambda model, batch: model(**batch)``. Default: the model
            is called with the batch, or the first element of a list or tuple.

    Raises:
        ValueError: If the loader is empty, or ``device`` and ``call`` are both given.
        RuntimeError: If an average is swapped into the model, as inside ``EMA.applied()``.

    Example:
        >>> import torch
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, update_bn
        >>> average = AveragedModel(nn.BatchNorm1d(1))
        >>> update_bn([torch.tensor([[2.0], [4.0]])], average)
        >>> batches = [{"input": torch.tensor([[2.0], [6.0]])}]
        >>> update_bn(batches, average, call=lambda model, batch: model(**batch))
        >>> average.module.running_mean
        tensor([4.])
    """
    if not batch_norm.layers_of(model):
        return

    if any_swapped(model):
        raise RuntimeError(
            "update_bn() was called inside applied() or evaluating(): it would overwrite the "
            "statistics of the average. Call ema.update_bn(loader) outside of the block. Nothing "
            "has been changed."
        )

    batch_norm.recompute(loader, model, device, call)


publish_all(globals())
