"""Names in annotations resolve where the user's code stands, and not in modkit."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import same
from tests.parity.jit.networks import jit_tests


pytestmark = jit_tests


class Point(NamedTuple):
    """A type that only this file knows."""

    x: Tensor
    y: Tensor


Sizes = list[int]


def point():
    return Point(torch.ones(1), torch.ones(1))


def function_of_text(impl):
    """Compile a function whose annotations are strings."""

    @impl.jit.script
    def add(p: "Point", sizes: "Sizes") -> "Tensor":
        return p.x + p.y + len(sizes)

    return add(point(), [1])


def class_based(impl):
    """Compile a class with annotations of every kind."""

    class Net(impl.jit.ScriptModule):
        sizes: Sizes

        def __init__(self):
            super().__init__()
            self.sizes = []

        @impl.jit.script_method
        def forward(self, p, sizes):
            # type: (Point, Sizes) -> Tensor
            return p.x + len(sizes) + len(self.sizes)

        @impl.jit.script_method
        def other(self, p: "Point", sizes: "Sizes") -> "Tensor":
            return p.y + len(sizes)

    net = Net()
    return net(point(), [1]), net.other(point(), [1]), net.sizes


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


@for_each("scenario", [function_of_text, class_based, interface_of_text])
def test_names_in_annotations_resolve_in_the_users_module(scenario):
    """Strings, comments and types of this file give what they give in torch."""
    assert same(scenario)[0] == "returned"
