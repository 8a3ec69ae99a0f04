"""Type aliases and type variables; imports nothing of modkit."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch


ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# A gradient argument of a backward hook: one tensor, or a tuple with ``None`` for non-tensors.
Gradients: TypeAlias = tuple[torch.Tensor | None, ...] | torch.Tensor

TensorFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

# The hooks of a module, by what they are called with. Results other than None replace something.
ForwardPreHook: TypeAlias = Callable[..., Any]
ForwardHook: TypeAlias = Callable[..., Any]
BackwardPreHook: TypeAlias = Callable[[torch.nn.Module, Gradients], Gradients | None]
BackwardHook: TypeAlias = Callable[[torch.nn.Module, Gradients, Gradients], Gradients | None]
StateDictPreHook: TypeAlias = Callable[[Any, str, bool], None]
StateDictPostHook: TypeAlias = Callable[[Any, dict[str, Any], str, dict[str, Any]], Any]
LoadStateDictPreHook: TypeAlias = Callable[..., None]
LoadStateDictPostHook: TypeAlias = Callable[[Any, Any], None]
