"""Helpers of the tests of TorchScript."""

import io
from typing import Any

import pytest
import torch

from modkit import nn


# Every public entry of torch.jit says so since torch 2.13; it works all the same.
scripted_tests = pytest.mark.filterwarnings("ignore:`torch.jit")


def reloaded(scripted: Any) -> Any:
    """Send a compiled module through an archive."""
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


class SharedLayer(nn.Module):
    """A network with a layer in two places, a buffer beside the state, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.head(self.second(self.first(x) * self.mask))
