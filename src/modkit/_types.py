"""Type aliases and type variables; imports nothing of modkit."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Tensor: TypeAlias = torch.Tensor
