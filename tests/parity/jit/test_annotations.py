"""Names in annotations resolve where the user's code stands, and not in modkit."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import same


pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


class Point(NamedTuple):
    """A type that only this file knows."""

    x: Tensor
    y: Tensor


Sizes = list[int]


def point():
    """Return a point."""
    return Point(torch.ones(1), torch.ones(1))


def function_of_text(impl):
    """Compile a function whose annotations are strings."""

    @impl.jit.script
    def add(p: "Point", sizes: "Sizes") -> "Tensor":
        return p.x + p.y + len(sizes)

    return add(point(), [1])


def module_with_annotations(impl):
    """Compile a module with annotated attributes, an exported method and a property."""

    class Net(impl.nn.Module):
        sizes: Sizes

        def __init__(self):
            super().__init__()
            self.sizes = []

        @property
        def twice(self) -> Sizes:
            return self.sizes + self.sizes

        def forward(self, p, sizes):
            # type: (Point, Sizes) -> Tensor
            return p.x + len(sizes)

        @impl.jit.export
        def count(self, more: "Sizes") -> int:
            return len(self.sizes) + len(more) + len(self.twice)

    module = impl.jit.script(Net())
    return module(point(), [1]), module.count([1, 2])


def class_based(impl):
    """Compile a class with annotations of every kind."""

    class Net(impl.jit.ScriptModule):
        sizes: Sizes

        def __init__(self):
            super().__init__()
            self.sizes = []
            self.names = impl.jit.Attribute([], list[str])

        @impl.jit.script_method
        def forward(self, p, sizes):
            # type: (Point, Sizes) -> Tensor
            return p.x + len(sizes) + len(self.names)

        @impl.jit.script_method
        def other(self, p: "Point", sizes: "Sizes") -> "Tensor":
            return p.y + len(sizes)

    net = Net()
    return net(point(), [1]), net.other(point(), [1]), net.names, net.sizes


def interface_of_text(impl):
    """Compile an interface with annotations that are strings."""

    @impl.jit.interface
    class Adds(impl.nn.Module):
        def forward(self, p: "Point", sizes: "Sizes") -> "Tensor":
            pass

    class Plus(impl.nn.Module):
        def forward(self, p: "Point", sizes: "Sizes") -> "Tensor":
            return p.x + len(sizes)

    class Net(impl.nn.Module):
        child: Adds

        def __init__(self):
            super().__init__()
            self.child = Plus()

        def forward(self, p: Point) -> Tensor:
            return self.child.forward(p, [1])

    return impl.jit.script(Net())(point())


def script_if_tracing(impl):
    """Compile a function within a trace; the wrapper has torch's attributes."""

    @impl.jit.script_if_tracing
    def absolute(x: "Tensor", sizes: "Sizes") -> "Tensor":
        if bool(x.sum() > 0):
            return x
        return -x

    traced = impl.jit.trace(lambda x: absolute(x, [1]), torch.ones(1))
    return absolute(torch.ones(1), [1]), sorted(vars(absolute)), traced(-torch.ones(1))


SCENARIOS = {
    scenario.__name__: (scenario, expected)
    for scenario, expected in [
        (function_of_text, "returned"),
        (module_with_annotations, "returned"),
        (class_based, "returned"),
        (interface_of_text, "returned"),
        (script_if_tracing, "returned"),
    ]
}


@for_each("name", SCENARIOS)
def test_names_in_annotations_resolve_in_the_users_module(name):
    """Strings, comments and types of this file give what they give in torch."""
    scenario, expected = SCENARIOS[name]

    assert same(scenario)[0] == expected
