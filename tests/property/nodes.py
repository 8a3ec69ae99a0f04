"""The user-defined module class of the random trees, defined once per implementation.

`nodes_torch.Node` and `nodes_modkit.Node` are the two: each lives in a file of its own, so that
pickle finds both under the same name.
"""

from typing import Any

from tests.helpers import Implementation


# Containers that are not called themselves: their children are, in order.
TRANSPARENT = ("ModuleList", "ModuleDict")
# Containers of parameters, which have nothing to call.
SILENT = ("ParameterList", "ParameterDict")


def define_node(impl: Implementation, home: str) -> type:
    """Define the class `Node` of the file `home` as a module of the implementation."""

    class Node(impl.Module):
        """Add the sums of all own tensors to the input, then pass it through the children."""

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            for value in [*self._parameters.values(), *self._buffers.values()]:
                if value is not None and value.is_floating_point():
                    x = x + value.to(x.dtype).sum() * scale
            return pass_through(self._modules.values(), x)

    Node.__module__ = home
    Node.__qualname__ = "Node"
    return Node


def pass_through(children: Any, x: Any) -> Any:
    """Call the children one after the other, looking into containers that cannot be called."""
    for child in children:
        if child is None or type(child).__name__ in SILENT:
            continue
        if type(child).__name__ in TRANSPARENT:
            x = pass_through(child._modules.values(), x)
        else:
            x = child(x)
    return x
