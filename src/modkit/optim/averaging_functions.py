"""The averaging functions of ``torch.optim.swa_utils``, which can be pickled and compared here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from modkit.averaging.precision import TensorList
from modkit.averaging.rules import Ema, Rule, Swa


AvgFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | int], Tensor]
MultiAvgFn: TypeAlias = Callable[[TensorList, TensorList, Tensor | int], None]


@dataclass(repr=False, unsafe_hash=True)
class AveragingFunction:
    """Calls torch's function, and shows and pickles how it was made.

    Torch's functions are closures, which pickle cannot find by name and which are never equal.

    Attributes:
        name: The function of ``torch.optim.swa_utils`` that makes the averaging function.
        decay: Its argument, if the rule has one.
        rule: The steps that the engine takes with kernels of its own, in place of the function.
    """

    name: str
    decay: float | None = None
    rule: Rule | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        self._arguments = () if "swa" in self.name else (self.decay,)
        self._function = getattr(torch.optim.swa_utils, self.name)(*self._arguments)
        # The name and the signature of torch's, which loggers and configuration tools show.
        update_wrapper(self, self._function)

        if self.name == "get_ema_multi_avg_fn" and self.decay is not None:
            self.rule = Ema((1 - self.decay,), self._function)
        elif self.name == "get_swa_multi_avg_fn":
            self.rule = Swa(function=self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's function."""
        return self._function(*args, **kwargs)

    @override
    def __repr__(self) -> str:
        return f"{self.name}({f'decay={self.decay}' if self._arguments else ''})"

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[float | None, ...]]:
        # The public function: pickles stay readable if this class moves.
        return globals()[self.name], self._arguments


def get_ema_multi_avg_fn(decay: float = 0.999) -> MultiAvgFn:
    """Return the exponential moving average of lists of tensors, a ``multi_avg_fn``.

    It computes ``average = decay * average + (1 - decay) * current`` in place, with fused kernels.

    Args:
        decay: Part of the average that stays in a step, from 0 to 1.

    modkit: The function can be pickled and compared, and its ``repr`` shows the rule and the decay.

    Returns:
        A function of the averaged tensors, the current tensors and the number of models averaged so
        far, which it does not use. It writes the first list in place. All tensors of a call have
        one device and dtype, and those at the same place the same shape. The decay is applied in
        every call: ``AveragedModel`` uses it from the second update on, as the first one copies.

    Raises:
        ValueError: If ``decay`` is outside [0, 1].

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_ema_multi_avg_fn(0.75)(averaged, current, 1)
        >>> averaged
        [tensor([1.2500])]
    """
    return AveragingFunction("get_ema_multi_avg_fn", decay)


def get_swa_multi_avg_fn() -> MultiAvgFn:
    """Return the equal average of lists of tensors, a ``multi_avg_fn``, which works in place.

    modkit: A step computes ``average + (current - average) / (n + 1)``, where ``n`` is the number
    of models averaged so far: the mean of all of them (https://arxiv.org/abs/1803.05407). The
    function can be pickled and compared, and its ``repr`` shows the rule.

    Returns:
        A function of the averaged tensors, the current tensors and ``n``, an int or a tensor of one
        element. It writes the first list in place. All tensors of a call have one device and dtype,
        and those at the same place the same shape.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_swa_multi_avg_fn
        >>> averaged, current = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> get_swa_multi_avg_fn()(averaged, current, 3)
        >>> averaged
        [tensor([1.2500])]
    """
    return AveragingFunction("get_swa_multi_avg_fn")


def get_ema_avg_fn(decay: float = 0.999) -> AvgFn:
    """Return the exponential moving average of one tensor, an ``avg_fn``.

    It computes ``decay * average + (1 - decay) * current``. The ``multi_avg_fn`` is faster.

    Args:
        decay: Part of the average that stays in a step, from 0 to 1.

    modkit: The function can be pickled and compared, and its ``repr`` shows the rule and the decay.

    Returns:
        A function of the averaged tensor, the current tensor and the number of models averaged so
        far, which it does not use. It returns the new average, in the dtype of torch's type
        promotion, and changes neither tensor.

    Raises:
        ValueError: If ``decay`` is outside [0, 1].

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_ema_avg_fn
        >>> get_ema_avg_fn(0.75)(torch.tensor([1.0]), torch.tensor([2.0]), 1)
        tensor([1.2500])
    """
    return AveragingFunction("get_ema_avg_fn", decay)


def get_swa_avg_fn() -> AvgFn:
    """Return the equal average of one tensor, an ``avg_fn``.

    modkit: A step computes ``average + (current - average) / (n + 1)``, where ``n`` is the number
    of models averaged so far: the mean of all of them (https://arxiv.org/abs/1803.05407). The
    function can be pickled and compared, and its ``repr`` shows the rule.

    Returns:
        A function of the averaged tensor, the current tensor and ``n``, an int or a tensor of one
        element. It returns the new average and changes neither tensor.

    Example:
        >>> import torch
        >>> from modkit.optim.swa_utils import get_swa_avg_fn
        >>> get_swa_avg_fn()(torch.tensor([1.0]), torch.tensor([2.0]), 3)
        tensor([1.2500])
    """
    return AveragingFunction("get_swa_avg_fn")
