"""Weight averaging, equal (SWA) and exponential (EMA): drop-in for ``torch.optim.swa_utils``.

``AveragedModel`` keeps a running average of a model's weights, ``update_bn`` refreshes the batch
normalization statistics of the result, and ``SWALR`` is the learning-rate schedule that goes with
equal averaging. ``SWALR`` is torch's own class: schedulers belong to the optimizer, of which modkit
has no version.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR, AveragedModel as _TorchAveragedModel
from typing_extensions import TypeVar, override

from modkit.averaging._batch_norm import CallFn, norm_layers, update_statistics
from modkit.averaging._match import averaged_tensors, pair_by_position
from modkit.averaging._update import (
    AvgFn,
    MultiAvgFn,
    TensorList,
    copy_each,
    ema_,
    ema_of,
    swa_,
    swa_of,
    update_each,
    update_grouped,
)
from modkit.nn.module import Module


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

ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)


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
    return _MultiEMA(decay)


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
    return _MultiSWA()


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
    return _EMA(decay)


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
    return _SWA()


def _check_decay(decay: float) -> None:
    """Refuse a decay outside of [0, 1] in torch's words."""
    if decay < 0.0 or decay > 1.0:
        message = f"Invalid decay value {decay} provided. Please provide a value in [0,1] range."
        raise ValueError(message)


# The four functions are objects, because a closure has no name that pickle could find. Each pickles
# as a call of the public function that made it, so that these classes may move or be renamed.
@dataclass(frozen=True)
class _MultiEMA:
    decay: float

    def __call__(
        self, ema_param_list: PARAM_LIST, current_param_list: PARAM_LIST, _: Tensor | int
    ) -> None:
        with torch.no_grad():
            ema_(ema_param_list, current_param_list, self.decay)

    def __reduce__(self) -> tuple[Callable[[float], MultiAvgFn], tuple[float]]:
        return get_ema_multi_avg_fn, (self.decay,)


@dataclass(frozen=True)
class _MultiSWA:
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
class _EMA:
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
class _SWA:
    def __call__(
        self, averaged_param: Tensor, current_param: Tensor, num_averaged: Tensor | int
    ) -> Tensor:
        with torch.no_grad():
            return swa_of(averaged_param, current_param, num_averaged)

    def __reduce__(self) -> tuple[Callable[[], AvgFn], tuple[()]]:
        return get_swa_avg_fn, ()


class AveragedModel(_TorchAveragedModel, Module, Generic[ModelT]):
    """Keeps a running average of a model's weights, as a model of its own.

    Use it for stochastic weight averaging (SWA, the equal mean of the weights at the end of
    training: https://arxiv.org/abs/1803.05407) and for exponential moving averages (EMA). The
    averaged copy is the attribute ``module``; calling the averaged model calls that copy.

    The first ``update_parameters`` copies the weights, each later one averages. Without an
    averaging function all updates weigh the same. The functions are not part of ``state_dict()``:
    pass them again when an average is loaded.

    With ``use_buffers=False`` each update copies the buffers, so the batch normalization statistics
    are those of the last model seen and not of the averaged weights: call ``update_bn`` at the end
    of training. With ``use_buffers=True`` they are averaged along the way.

    Args:
        model: The model to average. It is deep-copied, and stays as it is.
        device: Where the average is kept; by default where the model is.
        avg_fn: Returns the new average from the averaged tensor, the model's tensor and the number
            of models averaged so far. Not together with ``multi_avg_fn``.
        multi_avg_fn: The same for a list of averaged tensors and a list of the model's tensors, all
            of one device and dtype; it writes the first list in place.
        use_buffers: Whether buffers are averaged, not copied.

    Attributes:
        module: The averaged copy; a type checker knows it by the type of ``model``.
        n_averaged: Buffer, a 0-dimensional ``int64`` tensor: how many updates there were.

    Raises:
        AssertionError: Both averaging functions are given.

    Example:
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        >>> for value in 1.0, 2.0:
        ...     _ = nn.init.constant_(model.weight, value)
        ...     ema.update_parameters(model)
        >>> ema.module.weight.item(), ema.n_averaged.item()
        (1.25, 2)

    Same as `torch.optim.swa_utils.AveragedModel`, and typed by the class of the model.
    """

    module: ModelT
    n_averaged: Tensor
    avg_fn: AvgFn | None
    multi_avg_fn: MultiAvgFn | None
    use_buffers: bool

    def __init__(
        self,
        model: ModelT,
        device: int | torch.device | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        use_buffers: bool = False,
    ) -> None:
        # Torch's class is a base only for ``isinstance``: its own initialization is passed over.
        super(_TorchAveragedModel, self).__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            message = "Only one of avg_fn and multi_avg_fn should be provided"
            raise AssertionError(message)
        self.module = deepcopy(model)
        if device is not None:
            self.module = self.module.to(device)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged copy."""
        return self.module(*args, **kwargs)

    @override
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take the model's present weights into the average.

        Call it after ``optimizer.step()`` (EMA) or at the end of an epoch (SWA). The first call
        copies.

        Args:
            model: The model in training, with as many and equally shaped tensors, in the same
                order, on any device.

        Raises:
            ValueError: The number of buffers differs, and they are not averaged.
            RuntimeError: Two tensors that belong together have shapes that do not broadcast.

        Same as `torch.optim.swa_utils.AveragedModel.update_parameters`.
        """
        # Without buffers the search starts here, so that parameters of a subclass take part.
        root = self.module if self.use_buffers else self
        averaged, current = pair_by_position(
            averaged_tensors(root, use_buffers=self.use_buffers),
            averaged_tensors(model, use_buffers=self.use_buffers),
        )
        if self.n_averaged == 0:
            copy_each(averaged, current)
        elif self.avg_fn is not None and self.multi_avg_fn is None:
            update_each(averaged, current, self.n_averaged, self.avg_fn)
        else:
            update_grouped(averaged, current, self.n_averaged, self.multi_avg_fn)
        if not self.use_buffers:
            copy_each(self.module.buffers(), model.buffers())
        self.n_averaged += 1


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
