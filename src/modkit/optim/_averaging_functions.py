"""The averaging functions of ``torch.optim.swa_utils``, as objects that can be pickled."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard, cast

from torch import Tensor
from torch.optim import swa_utils
from typing_extensions import override

from modkit.averaging.precision import TensorList


PARAM_LIST: TypeAlias = TensorList
AvgFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | int], Tensor]
MultiAvgFn: TypeAlias = Callable[[TensorList, TensorList, Tensor | int], None]


@dataclass(frozen=True, repr=False)
class AveragingFunction:
    """Calls torch's function, and shows and pickles how it was made."""

    name: str
    decay: float | None = None
    function: Callable[..., Any] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        function = getattr(swa_utils, self.name)(*self._arguments())
        object.__setattr__(self, "function", function)

    def _arguments(self) -> tuple[float, ...]:
        return () if "swa" in self.name else (cast("float", self.decay),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @override
    def __repr__(self) -> str:
        return f"{self.name}({'' if 'swa' in self.name else f'decay={self.decay}'})"

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[float, ...]]:
        # The public function: pickles stay readable if this class moves.
        return globals()[self.name], self._arguments()


def is_known(function: object) -> TypeGuard[AveragingFunction]:
    """Return True for the ``multi_avg_fn`` of this library, which the engine has kernels for."""
    return isinstance(function, AveragingFunction) and "multi" in function.name


def get_ema_multi_avg_fn(decay: float = 0.999) -> MultiAvgFn:
    """Return the exponential moving average of lists of tensors, a ``multi_avg_fn``.

    It computes ``decay * average + (1 - decay) * current`` in place, with fused kernels. A decay
    outside [0, 1] raises ValueError.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_ema_multi_avg_fn(0.75)(averaged, current, 1)
        >>> averaged
        [tensor([1.2500])]

    Differs from torch: the function can be pickled and shows its decay.
    """
    return AveragingFunction("get_ema_multi_avg_fn", decay)


def get_swa_multi_avg_fn() -> MultiAvgFn:
    """Return the equal average of lists of tensors, a ``multi_avg_fn``.

    With ``n`` models averaged so far, it moves the average by ``1 / (n + 1)`` of the way to the
    current value, in place.

    Differs from torch: the function can be pickled.
    """
    return AveragingFunction("get_swa_multi_avg_fn")


def get_ema_avg_fn(decay: float = 0.999) -> AvgFn:
    """Return the exponential moving average of one tensor, an ``avg_fn``; it returns the new value.

    Differs from torch: the function can be pickled and shows its decay.
    """
    return AveragingFunction("get_ema_avg_fn", decay)


def get_swa_avg_fn() -> AvgFn:
    """Return the equal average of one tensor, an ``avg_fn``; it returns the new value.

    Differs from torch: the function can be pickled.
    """
    return AveragingFunction("get_swa_avg_fn")


for _function in (get_ema_multi_avg_fn, get_swa_multi_avg_fn, get_ema_avg_fn, get_swa_avg_fn):
    # Where users import them from, and where pickle finds them.
    _function.__module__ = "modkit.optim.swa_utils"
