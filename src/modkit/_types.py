"""Type aliases and type variables; imports nothing of modkit."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# The name that torch exports: type checkers regard ``from torch import Tensor`` as private.
Tensor: TypeAlias = torch.Tensor

# What a backward hook gets and returns. Slots of non-tensors hold None, which torch's own
# annotation leaves out.
Gradients: TypeAlias = tuple[torch.Tensor, ...] | torch.Tensor

TensorFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

# The hooks of a module, by what they are called with. Results other than None replace something.
ForwardPreHook: TypeAlias = Callable[..., Any]
ForwardHook: TypeAlias = Callable[..., Any]
BackwardHook: TypeAlias = Callable[[torch.nn.Module, Gradients, Gradients], Gradients | None]
StateDictPostHook: TypeAlias = Callable[[Any, dict[str, Any], str, dict[str, Any]], Any]
