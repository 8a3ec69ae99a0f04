"""Networks that mix user classes, layers and containers, with members of every kind."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.helpers import Implementation


# How layers print.
LINEAR = "Linear(in_features=2, out_features=2, bias=True)"
SEQUENTIAL = f"Sequential(\n  (0): {LINEAR}\n  (1): {LINEAR}\n)"

# The names of a network's members, in torch's order.
BLOCK_PARAMETERS = ["linear.weight", "linear.bias", "norm.weight", "norm.bias"]
BLOCK_BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
PARAMETERS = [
    "scale",
    *(f"block.{name}" for name in BLOCK_PARAMETERS),
    *(f"head.0.{name}" for name in BLOCK_PARAMETERS),
    "head.1.weight",
    "head.1.bias",
]
BUFFERS = [
    "mean",
    "count",
    "scratch",
    *(f"block.{name}" for name in BLOCK_BUFFERS),
    *(f"head.0.{name}" for name in BLOCK_BUFFERS),
]
MODULES = [
    "",
    "block",
    "block.linear",
    "block.norm",
    "block.dropout",
    "head",
    "head.0",
    "head.0.linear",
    "head.0.norm",
    "head.0.dropout",
    "head.1",
]


def network(impl: Implementation) -> Any:
    """Build a user class over a user class and a container; `None` slots included."""
    nn = impl.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.norm(self.linear(x)))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_parameter("shift", None)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("scratch", torch.ones(2), persistent=False)
            self.register_buffer("unset", None)
            self.block = Block()
            self.head = nn.Sequential(Block(), nn.Linear(3, 2))

        def forward(self, x):
            return self.head(self.block(x * self.scale - self.mean))

    return Network()


def tensors(module: Any) -> Iterator[torch.Tensor]:
    """Yield all parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def applying(impl: Implementation, function: Callable[..., Any]) -> Any:
    """Build a module whose forward is the function."""

    class Applying(impl.nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Applying()


def scaling(impl: Implementation, factor: float = 2.0) -> Any:
    """Build a module with one parameter that multiplies its input."""

    class Scaling(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = impl.nn.Parameter(torch.tensor([factor]))

        def forward(self, x):
            return x * self.factor

    return Scaling()


def nested(impl: Implementation) -> Any:
    """Build the network of the diagram for `get_submodule`."""
    nn = impl.nn

    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.net_b = nn.Module()
            self.net_b.net_c = nn.Module()
            self.net_b.net_c.conv = nn.Conv2d(16, 33, kernel_size=3, stride=2)
            self.net_b.linear = nn.Linear(100, 200)

    return A()


def requiring(*values: float) -> torch.Tensor:
    """Make a non-leaf tensor of the values that requires grad."""
    return torch.tensor(values or (1.0,), requires_grad=True) * 1
