"""The user-defined module classes of the random trees, defined once per implementation.

The files `nodes_torch` and `nodes_modkit` hold the two sets: each lives in a file of its own, so
that pickle finds both under the same names.
"""

from typing import Any

from tests.helpers import Implementation
from tests.property.mixed_nodes import define_mixed
from tests.property.node_tools import LOG, override


# Containers that are not called themselves: their children are, in order.
TRANSPARENT = ("ModuleList", "ModuleDict")
# Containers of parameters, which have nothing to call.
SILENT = ("ParameterList", "ParameterDict")
# The methods that users override; an override logs its call and passes it on.
OVERRIDDEN = (
    "train",
    "eval",
    "_apply",
    "apply",
    "float",
    "zero_grad",
    "requires_grad_",
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "modules",
    "named_modules",
    "children",
    "named_children",
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "_named_members",
    "register_parameter",
    "register_buffer",
    "add_module",
    "__setattr__",
    "__delattr__",
    "__repr__",
    "extra_repr",
    "_get_name",
    "get_submodule",
    "_call_impl",
    "_get_backward_hooks",
)


def define_classes(impl: Implementation, home: str) -> dict[str, type]:
    """Define the classes of the file `home` as modules of the implementation."""

    class Node(impl.Module):
        """Add the sums of all own tensors to the input, then pass it through the children."""

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            for value in [*self._parameters.values(), *self._buffers.values()]:
                if value is not None and value.is_floating_point():
                    x = x + value.to(x.dtype).sum() * scale
            return pass_through(self._modules.values(), x)

    class Counting(Node):
        """A module whose extra state is its number of calls."""

        calls = 0

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            self.calls += 1
            return super().forward(x, scale)

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    class Reader(impl.Module):
        """A module that reads its members as attributes."""

        residual = False

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            hidden = self.act(self.inner(x) * self.scale + self.shift)
            for child in self.more:
                hidden = child(hidden)
            hidden = hidden * scale
            return x + hidden if self.residual else hidden

    class Forwarding(impl.Module):
        """A wrapper that looks up missing attributes in the wrapped module, and logs each lookup."""

        def forward(self, x: Any, **kwargs: Any) -> Any:
            return self.inner(x, **kwargs) * self.scale

        def __getattr__(self, name: str) -> Any:
            LOG.append(("__getattr__", name))
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "inner":
                    raise
                return getattr(self.inner, name)

    classes = {"Node": Node, "Counting": Counting, "Reader": Reader, "Forwarding": Forwarding}
    for method in OVERRIDDEN:
        classes[f"Overrides{method}"] = override(Node, method)
    classes.update(define_mixed(impl, Node))
    for name, defined in classes.items():
        defined.__module__ = home
        defined.__name__ = defined.__qualname__ = name
    return classes


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
