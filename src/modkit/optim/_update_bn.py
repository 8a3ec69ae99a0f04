"""``update_bn``: statistics of normalization layers, computed in one pass over the data.

Batch normalization layers run as in torch, where each call weighs the same. Beside that, the moments
of what goes in are gathered here, weighted by samples. They are written into the layer at the end
where the calls were of different sizes; else the layer keeps what it has computed itself, to the bit.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modkit._upstream import BatchNormBase


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

InstanceNorm: TypeAlias = (
    torch.nn.InstanceNorm1d | torch.nn.InstanceNorm2d | torch.nn.InstanceNorm3d
)
NormLayer: TypeAlias = BatchNormBase | InstanceNorm
CallFn: TypeAlias = Callable[[Any, Any], Any]
Device: TypeAlias = int | torch.device | None

_SPATIAL = {torch.nn.InstanceNorm1d: 1, torch.nn.InstanceNorm2d: 2, torch.nn.InstanceNorm3d: 3}
_STATISTICS = "running_mean", "running_var", "num_batches_tracked"


def update_bn(
    loader: Iterable[Any],
    model: torch.nn.Module,
    device: Device = None,
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
        raise ValueError(f"update_bn: max_batches must be at least 1, got {max_batches}")
    layers = _norm_layers(model)
    if not layers:
        return
    gathered = [_Moments(layer) for layer in layers if layer.track_running_stats]
    with torch.no_grad(), _restored_on_error(layers), _statistics_mode(model, layers):
        for layer in layers:
            layer.reset_running_stats()
        for layer in layers:
            # Without a momentum, the layer keeps the mean over all batches.
            cast("Any", layer).momentum = None
        hooks = [
            moments.layer.register_forward_pre_hook(moments.hook, with_kwargs=True)
            for moments in gathered
        ]
        try:
            seen = _run(itertools.islice(loader, max_batches), model, device, call_fn)
        finally:
            for hook in hooks:
                hook.remove()
        if not seen:
            raise ValueError("update_bn: the loader is empty, so there is nothing to compute from")
        for moments in gathered:
            _settle(moments, pooled, process_group)


class _Moments:
    """The mean and the variance of everything that one layer was given."""

    def __init__(self, layer: NormLayer) -> None:
        self.layer = layer
        self.per_instance = isinstance(layer, InstanceNorm)
        self.calls = 0
        self.sizes: set[int] = set()
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None

    def hook(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the input of one call of the layer."""
        given = (*args, *kwargs.values())[0]
        values = given.detach()
        if values.dtype in {torch.float16, torch.bfloat16}:
            values = values.float()
        if self.per_instance:
            self._add_instances(values)
        else:
            dims = [dim for dim in range(values.dim()) if dim != 1]
            count = values.numel() // max(values.shape[1], 1)
            variance, mean = torch.var_mean(values, dims, correction=0)
            self.add(count, _wide(mean), _wide(variance) * count)
        self.calls += 1

    def _add_instances(self, values: Tensor) -> None:
        """Take in the mean of the instances' means, and that of their variances."""
        spatial = next(n for kind, n in _SPATIAL.items() if isinstance(self.layer, kind))
        batched = values if values.dim() == spatial + 2 else values[None]
        variances, means = torch.var_mean(batched.flatten(2), 2)
        count = batched.shape[0]
        # What instances differ in is no part of a variance within them.
        variance = _wide(variances).mean(0)
        self.add(count, _wide(means).mean(0), variance * count, between=False)

    def add(self, count: int, mean: Tensor, squares: Tensor, *, between: bool = True) -> None:
        """Merge ``count`` values with this mean and this sum of squared deviations from it."""
        self.sizes.add(count)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        step = mean - self.mean
        self.mean = self.mean + step * (count / total)
        self.squares = self.squares + squares
        if between:
            self.squares = self.squares + step**2 * (self.count * count / total)
        self.count = total

    def gather(self, group: "ProcessGroup") -> None:
        """Merge in what the other processes of a group have seen."""
        features = self.layer.num_features
        mine = torch.zeros(2 * features + 1, dtype=torch.float64, device="cpu")
        if self.mean is not None and self.squares is not None:
            mine = torch.cat([mine.new_tensor([self.count]), self.mean.cpu(), self.squares.cpu()])
        device = self.layer.running_mean.device if self.layer.running_mean is not None else "cpu"
        every = [torch.zeros_like(mine, device=device) for _ in range(group.size())]
        torch.distributed.all_gather(every, mine.to(device), group=group)
        self.mean = self.squares = None
        for theirs in every:
            if count := int(theirs[0]):
                mean, squares = theirs[1:].split(features)
                self.add(count, mean, squares, between=not self.per_instance)

    def write(self) -> None:
        """Make the moments the statistics of the layer."""
        if self.mean is None or self.squares is None:
            return
        # Variances within instances are free of bias already, and averaged.
        degrees = self.count if self.per_instance else max(self.count - 1, 1)
        cast("Tensor", self.layer.running_mean).copy_(self.mean)
        cast("Tensor", self.layer.running_var).copy_(self.squares / degrees)

    def are_complete(self) -> bool:
        """Tell whether every call was seen: compiled code passes hooks by."""
        tracked = self.layer.num_batches_tracked
        return self.per_instance or tracked is None or self.calls == int(tracked)


def _norm_layers(model: torch.nn.Module) -> list[NormLayer]:
    """List the layers of ``model`` whose statistics come from data."""
    return [
        module
        for module in model.modules()
        if isinstance(module, BatchNormBase)
        or (isinstance(module, InstanceNorm) and module.track_running_stats)
    ]


def _settle(moments: _Moments, pooled: bool | None, group: "ProcessGroup | None") -> None:
    """Replace what the layer has computed by its moments, where those are what is asked for."""
    if group is not None:
        moments.gather(group)
        moments.write()
        return
    if isinstance(moments.layer, torch.nn.SyncBatchNorm):
        return
    if pooled is None:
        pooled = len(moments.sizes) > 1
    if moments.per_instance or (pooled and moments.are_complete()):
        moments.write()


def _run(
    batches: Iterable[Any], model: torch.nn.Module, device: Device, call_fn: CallFn | None
) -> int:
    """Call the model with each batch, and return how many there were."""
    count = 0
    for count, batch in enumerate(batches, 1):  # noqa: B007
        if call_fn is not None:
            call_fn(model, batch if device is None else _moved(batch, device))
            continue
        inputs = batch
        if isinstance(batch, (list, tuple)):
            inputs = cast("Sequence[Any]", batch)[0]
        if device is not None:
            inputs = _moved(inputs, device) if _is_container(inputs) else inputs.to(device)
        if isinstance(inputs, Mapping):
            model(**cast("Mapping[str, Any]", inputs))
        else:
            model(inputs)
    return count


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, list, tuple)) and not hasattr(value, "to")


def _moved(value: Any, device: Device) -> Any:
    """Return a batch with all of its tensors on ``device``; other leaves stay as they are."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in cast("Any", value).items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, device) for item in cast("Sequence[Any]", value)]
        kind = cast("Any", type(cast("object", value)))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return value


@contextmanager
def _statistics_mode(model: torch.nn.Module, layers: Iterable[NormLayer]) -> Generator[None]:
    """Train the given layers alone, and put every mode and momentum back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    try:
        # By attribute: `train` may be overridden to freeze layers, and descends to all children.
        for module, _ in modes:
            module.training = False
        for layer, _ in momenta:
            layer.training = True
        yield
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in momenta:
            cast("Any", layer).momentum = momentum


@contextmanager
def _restored_on_error(layers: Iterable[NormLayer]) -> Generator[None]:
    """Put the statistics of the layers back, in place, if the block fails."""
    saved = [
        (tensor, tensor.clone())
        for layer in layers
        for name in _STATISTICS
        if (tensor := cast("Tensor | None", getattr(layer, name))) is not None
        and not is_lazy(tensor)
    ]
    try:
        yield
    except BaseException:
        for tensor, value in saved:
            tensor.copy_(value)
        raise


def _wide(values: Tensor) -> Tensor:
    """Return values in the precision in which they are summed up: double where there is one."""
    return values if values.device.type == "mps" else values.double()
