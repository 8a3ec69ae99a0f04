"""The models of the behavior tests, each built on one of the implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers import Implementation


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


def empty(impl: Implementation) -> torch.nn.Module:
    """Build a module without members; its class name is the same in both implementations."""

    class Empty(impl.Module):
        pass

    return Empty()


def child_leaf(impl: Implementation) -> torch.nn.Module:
    """Build the smallest module that has a parameter, to be used as a child."""

    class Child(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

    return Child()


def leaf(impl: Implementation, value: float = 1.0) -> torch.nn.Module:
    """Build a module with one member of every kind, ``None`` slots included, but no child."""

    class Leaf(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2, 3), value))
            self.register_parameter("bias", None)
            self.register_buffer("mean", torch.full((3,), value))
            self.register_buffer("steps", torch.tensor(7))
            self.register_buffer("scratch", torch.ones(1), persistent=False)
            self.register_buffer("unset", None)
            self.flag = 3

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.weight + self.mean

    return Leaf()


def tree(impl: Implementation) -> torch.nn.Module:
    """Build three levels with a shared child, a ``None`` child and a tied parameter."""

    class Branch(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = leaf(impl, 2.0)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

    class Tree(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
            self.left = Branch()
            self.right = leaf(impl, 3.0)
            self.again = self.right
            self.add_module("nothing", None)
            self.tied = self.left.scale
            self.label = "tree"

    return Tree()


def with_dtypes(impl: Implementation) -> torch.nn.Module:
    """Build a module with a member of every kind of dtype, with gradients, over two levels."""

    class Mixed(impl.Module):
        def __init__(self):
            super().__init__()
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
                name = "p_" + str(dtype).split(".")[1]
                setattr(self, name, torch.nn.Parameter(torch.full((2,), 1.5, dtype=dtype)))
                self.register_buffer(f"{name}_buffer", torch.full((2,), 0.25, dtype=dtype))
            self.p_complex = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64) * (1 + 2j))
            self.p_integer = torch.nn.Parameter(torch.arange(2), requires_grad=False)
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("loose", torch.ones(2), persistent=False)
            self.register_buffer("unset", None)
            self.register_parameter("none", None)
            for parameter in (self.p_float32, self.p_float64, self.p_complex):
                parameter.grad = torch.full_like(parameter, 3)

    module = Mixed()
    module.child = Mixed()
    module.plain = torch.ones(2)
    return module


def chain(impl: Implementation, depth: int) -> torch.nn.Module:
    """Build ``depth`` modules, each the only child of the one before; the last has a parameter."""

    class Link(impl.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.n(value) if "n" in self._modules else value + self.weight

    node = Link()
    node.weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(depth - 1):
        parent = Link()
        parent.n = node
        node = parent
    return node


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


def parent_and_child(impl: Implementation) -> Any:
    """Make a module that holds a parameter and one child `c` with a parameter and a buffer."""

    class Child(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))
            self.register_buffer("b", torch.zeros(1))

    class Parent(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = torch.nn.Parameter(torch.zeros(1))
            self.c = Child()

    return Parent()


def function_module(impl: Implementation, function: Callable[..., Any]) -> Any:
    """Build a module whose forward is the function."""

    class Applied(impl.nn.Module):
        def forward(self, *args: object, **kwargs: object) -> object:
            return function(*args, **kwargs)

    return Applied()


def normed_net(impl: Implementation) -> torch.nn.Module:
    """Build a network with parameters, float buffers and an integer buffer."""
    return impl.nn.Sequential(
        impl.nn.Linear(3, 4), impl.nn.BatchNorm1d(4), impl.nn.ReLU(), impl.nn.Linear(4, 2)
    )


def one_weight(impl: Implementation, value: float = 0.0) -> torch.nn.Module:
    """Build a network that consists of a single number."""
    model = impl.nn.Linear(1, 1, bias=False)
    return set_weight(model, value)


def set_weight(model: torch.nn.Module, value: float) -> torch.nn.Module:
    """Give every parameter of the model one value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def tensors(module: Any) -> Iterator[torch.Tensor]:
    """Yield all parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()
