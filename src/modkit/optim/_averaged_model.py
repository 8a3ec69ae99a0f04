"""The averaged model of ``modkit.optim.swa_utils``."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final, Generic, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel as _TorchAveragedModel
from torch.overrides import TorchFunctionMode
from typing_extensions import TypeVar, override

from modkit.averaging._members import canonical_names
from modkit.averaging._pairs import PairCache, Pairs, copy_slots
from modkit.averaging._sharded import is_fully_sharded
from modkit.averaging._sharded_copy import copy_fully_sharded
from modkit.averaging._update import (
    AvgFn,
    Group,
    MultiAvgFn,
    copy_each,
    masked_sources,
    step_,
    step_traced_,
)
from modkit.nn.module import Module


AveragePrecision: TypeAlias = Literal["same", "fp32", "fp64"]
OnNonfinite: TypeAlias = Literal["ignore", "skip"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)

_WIDTHS: Final = {"fp32": torch.float32, "fp64": torch.float64}


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
    of training. With ``use_buffers=True`` they are averaged along the way. Integer and boolean
    buffers have no average, and are always copied.

    Args:
        model: The model to average. It is deep-copied, and stays as it is.
        device: Where the average is kept; by default where the model is.
        avg_fn: Returns the new average from the averaged tensor, the model's tensor and the number
            of models averaged so far. Not together with ``multi_avg_fn``.
        multi_avg_fn: The same for a list of averaged tensors and a list of the model's tensors, all
            of one device and dtype; it writes the first list in place.
        use_buffers: Whether buffers are averaged, not copied.
        precision: ``"fp32"`` and ``"fp64"`` keep floating-point weights in at least that many bits,
            without which the average of a bfloat16 model stands still from a decay of 0.99 on. The
            averaged model then computes in that dtype. ``modkit.EMA`` has further ways.
        on_nonfinite: ``"skip"`` leaves the average as it is, but for the count and the copied
            buffers, in an update in which a weight is infinite or NaN.

    Attributes:
        module: The averaged copy; a type checker knows it by the type of ``model``.
        n_averaged: Buffer, a 0-dimensional ``int64`` tensor: how many updates there were.

    Raises:
        AssertionError: Both averaging functions are given.
        ValueError: ``precision`` or ``on_nonfinite`` is unknown.

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

    Differs from torch: it is typed by the class of the model, pairs tensors by name, never waits
    for the device, and takes models that cannot be deep-copied because they hold results of autograd
    or are split up by ``fully_shard``: the copy is split up in the same way.
    """

    __module__ = "modkit.optim.swa_utils"

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
        *,
        precision: AveragePrecision = "same",
        on_nonfinite: OnNonfinite = "ignore",
    ) -> None:
        # Torch's class is a base only for ``isinstance``: its own initialization is passed over.
        super(_TorchAveragedModel, self).__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            message = "Only one of avg_fn and multi_avg_fn should be provided"
            raise AssertionError(message)
        _check_choice("precision", precision, get_args(AveragePrecision))
        _check_choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self._average_options = device, precision, on_nonfinite
        self._pair_cache = PairCache()
        self._counter = _Counter()
        # Tensors that are made in inference mode could never be updated outside of it.
        with torch.inference_mode(False):
            self.module = self._copy_of(model)
            self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers

    def _copy_of(self, model: ModelT) -> ModelT:
        """Return a copy of the model, where and in which dtype the average is kept."""
        device, precision, _ = self._average_options
        with _DetachedCopies():
            sharded = is_fully_sharded(model)
            copy = copy_fully_sharded(model, {}) if sharded else deepcopy(model)
        if device is not None:
            copy = copy.to(device)
        if precision != "same":
            _widen(copy, _WIDTHS[precision])
        return copy

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged copy."""
        return self.module(*args, **kwargs)

    @override
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take the model's present weights into the average.

        Call it after ``optimizer.step()`` (EMA) or at the end of an epoch (SWA). The first call
        copies. Parameters and buffers are paired by name, those of ``torch.compile``, data-parallel
        and checkpoint wrappers put aside. Buffers that are not saved may come and go, and buffers
        that are copied may change their shape.

        Args:
            model: The model in training, on any device.

        Raises:
            NameMismatchError: Tensors are missing, unexpected, or of another shape. It is a
                ValueError, lists their names, and is raised before anything is written.

        Differs from torch, which pairs tensors by position and broadcasts their shapes.
        """
        # Whatever has no parameters is refused in torch's words.
        model.parameters  # noqa: B018
        if torch.compiler.is_compiling():
            pairs = Pairs(self.module, model, self, use_buffers=self.use_buffers)
            step_traced_(pairs.groups, self.n_averaged, self.avg_fn, self.multi_avg_fn)
            copy_slots(pairs.copied)
            self.n_averaged.add_(1)
            return
        count = self._counter.read(self.n_averaged)
        if count == 0:
            self._materialize(model)
        pairs = self._pair_cache.pairs(self.module, model, self, use_buffers=self.use_buffers)
        groups: Sequence[Group] = pairs.groups
        if self._average_options[2] == "skip":
            groups = masked_sources(groups, pairs.meshes)
        if count == 0:
            for group in groups:
                copy_each(group.targets, group.sources)
        else:
            step_(groups, count, self.n_averaged, self.avg_fn, self.multi_avg_fn)
        copy_slots(pairs.copied)
        self._counter.advance(self.n_averaged)

    def _materialize(self, model: torch.nn.Module) -> None:
        """Copy the model again if the copy was made before the model had got its shapes."""
        lazy = any(is_lazy(tensor) for tensor in self.module.parameters())
        if lazy and not any(is_lazy(tensor) for tensor in model.parameters()):
            self.module = self._copy_of(cast("ModelT", model))

    def export_state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights and buffers as the plain model names them.

        Where the model was compiled or wrapped, the names that wrappers add are left out, so that
        ``plain.load_state_dict(averaged.export_state_dict())`` works for the model inside.

        Returns:
            A new mapping; the tensors are those of the average.

        Example:
            >>> from modkit import nn
            >>> from modkit.optim.swa_utils import AveragedModel
            >>> list(AveragedModel(nn.Linear(2, 1)).export_state_dict())
            ['weight', 'bias']
        """
        state: dict[str, Tensor] = self.module.state_dict()
        names = canonical_names(state)
        return {names[name]: tensor for name, tensor in state.items()}


class _Counter:
    """The number of updates as a plain int, which no device has to be asked for.

    The buffer is read again if it is another one, or if someone else has written it.
    """

    def __init__(self) -> None:
        self._value = 0
        self._buffer: Tensor | None = None
        self._version = -1

    def read(self, buffer: Tensor) -> int:
        """Return the number that ``buffer`` holds."""
        if buffer is not self._buffer or _version(buffer) != self._version:
            self._value = int(buffer)
            self._note(buffer)
        return self._value

    def advance(self, buffer: Tensor) -> None:
        """Count one update, here and in ``buffer``."""
        buffer.add_(1)
        self._value += 1
        self._note(buffer)

    def _note(self, buffer: Tensor) -> None:
        self._buffer, self._version = buffer, _version(buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Counter":
        return _Counter()

    def __reduce__(self) -> tuple[type["_Counter"], tuple[()]]:
        return _Counter, ()


def _version(buffer: Tensor) -> int:
    """Return how often a tensor was written; one made in inference mode is read each time."""
    return -2 if buffer.is_inference() else buffer._version


class _DetachedCopies(TorchFunctionMode):
    """Lets tensors that autograd has computed be deep-copied, as values.

    Modules keep such results, weight normalization for instance the weight of its last call.
    """

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _widen(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and buffers that have fewer bits than ``dtype``."""

    def widened(tensor: Tensor) -> Tensor:
        if tensor.is_complex() or tensor.is_floating_point():
            return tensor.to(torch.promote_types(_arithmetic(tensor.dtype), dtype))
        return tensor

    model._apply(widened)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that promotes: those of 8 bits do not."""
    return torch.float16 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        message = f"AveragedModel: {argument} must be one of {expected}, got {value!r}"
        raise ValueError(message)
