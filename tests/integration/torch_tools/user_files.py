"""Files of a user, for tools that import a model by its name, read its source or replace its module."""

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


# The name of the module is the same on both sides, because tools show it.
NAME = "users_networks"
NETWORKS = '''
"""The networks of a user."""

import torch
import {nn} as nn


class Block(nn.Module):
    """Scales what a linear layer returns.

    Args:
        width: Number of features.
        scale: Factor of the output.
    """

    def __init__(self, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.scale = scale
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled features."""
        return torch.relu(self.linear(x)) * self.scale


class Wide(Block):
    """A block with another layer."""

    def __init__(self, width: int = 8, extra: int = 2, **kwargs) -> None:
        super().__init__(width, **kwargs)
        self.last = nn.Linear(width, extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x))


class Net(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, body: nn.Module, head: nn.Module | None = None, depth: int = 2) -> None:
        super().__init__()
        self.body = body
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Identity() if head is None else head
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
'''


@contextlib.contextmanager
def written(nn: ModuleType, source: str = NETWORKS, name: str = NAME) -> Iterator[Path]:
    """Write a user's file, and let it be imported for the duration of the block."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(source.replace("{nn}", nn.__name__), encoding="utf-8")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield file
        finally:
            sys.path.remove(folder)
            sys.path_importer_cache.pop(folder, None)
            sys.modules.pop(name, None)


@contextlib.contextmanager
def imported(nn: ModuleType, source: str = NETWORKS, name: str = NAME) -> Iterator[ModuleType]:
    """Import a user's file for the duration of the block."""
    with written(nn, source, name):
        yield importlib.import_module(name)
