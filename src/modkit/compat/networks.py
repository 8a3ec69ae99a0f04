"""The networks of the behaviors, defined once for torch and once for modkit."""

from typing import Any

import torch
from torch import Tensor


def define(nn: Any, home: str) -> dict[str, type]:
    """Define the networks for one library.

    The base class is known only when this is called, so the classes are made here.
    """

    class Block(nn.Module):
        def __init__(self, gain: float = 1.0) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)
            self.gain = gain

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale * self.gain

        def extra_repr(self) -> str:
            return f"gain={self.gain}"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.blocks = nn.ModuleList([Block(), Block(gain=0.5)])
            # Special cases of each walk: shared modules, tied parameters, and None for a member.
            self.again = self.blocks[0]
            self.last = nn.Linear(4, 3, bias=False)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.blocks[1].linear.weight
            self.offset = nn.Parameter(torch.ones(3))
            self.register_parameter("unused", None)
            self.register_module("empty", None)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x)).relu()
            for block in self.blocks:
                x = block(x)
            return self.last(self.tied(self.again(x))) + self.offset

    class Scale(nn.Module):
        def __init__(self, value: float = 3.0) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([value]))

        def forward(self, x: Any, bias: float = 0.0) -> Any:
            return x * self.weight + bias

    class Pair(nn.Module):
        def __init__(self, left: Any, right: Any) -> None:
            super().__init__()
            self.left, self.right = left, right

        def forward(self, x: Tensor) -> Tensor:
            return self.right(self.left(x))

    classes: dict[str, type] = {cls.__name__: cls for cls in (Block, Net, Scale, Pair)}
    for name, cls in classes.items():
        # A pickle finds a class by these two, and would look for define.<locals>.Net otherwise.
        cls.__module__ = home
        cls.__qualname__ = name
    return classes
