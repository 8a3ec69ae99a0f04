"""Small hooks and modules that the hook tests share."""

from collections.abc import Callable
from typing import Any

import torch


def noting(log: list[Any], note: object) -> Callable[..., None]:
    """Make a hook of any signature that appends the note."""

    def hook(*_arguments: object) -> None:
        log.append(note)

    return hook


def recording(calls: list[Any]) -> Callable[..., None]:
    """Make a hook of any signature that appends all its arguments."""

    def hook(*arguments: object) -> None:
        calls.append(arguments)

    return hook


def capturing(log: list[Any]) -> Callable[..., None]:
    """Make a hook of any signature that appends the arguments it gets after the module."""

    def hook(_module: object, *arguments: object) -> None:
        log.append(arguments)

    return hook


def returning(value: object) -> Callable[..., Any]:
    """Make a hook of any signature that returns the value."""

    def hook(*_arguments: object) -> object:
        return value

    return hook


def do_nothing(*_arguments: object) -> None:
    """Be a hook that can be pickled."""


def leaf(*values: float) -> torch.Tensor:
    """Make a tensor of the values that requires grad."""
    return torch.tensor(values or (1.0,), requires_grad=True)
