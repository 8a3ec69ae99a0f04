"""Type aliases and type variables; imports nothing of modkit."""

from collections.abc import Callable
from typing import Any, TypeVar


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
