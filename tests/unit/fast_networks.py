"""What the tests of ``modkit.fast_attributes`` share."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers import Implementation


def make_net(impl: Implementation) -> torch.nn.Module:
    """Build a network with members of every kind, nested, one of them an empty slot."""
    nn = impl.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))
            self.register_parameter("nothing", None)
            self.register_buffer("offset", torch.rand(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
            self.inner = nn.Linear(4, 4)
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.label = "plain"

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.blocks(self.inner(x)) * self.scale + self.offset

    return Net()


def attributes(model: torch.nn.Module) -> list[tuple[type, list[tuple[str, int, list[Any]]]]]:
    """Tell what the ``__dict__`` of every module holds, in order; registries with their entries."""

    def describe(value: object) -> list[Any]:
        return [(key, id(entry)) for key, entry in value.items()] if type(value) is dict else []

    return [
        (type(module), [(name, id(v), describe(v)) for name, v in vars(module).items()])
        for module in model.modules()
    ]
