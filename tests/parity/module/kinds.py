"""Every kind of member that a name can stand for, and every kind of value to assign to it."""

import torch

from tests.capabilities import TENSOR_LIKE_BUFFERS
from tests.helpers import Implementation
from tests.models import child_leaf
from tests.parity.module.contents import TensorLike


def host(impl: Implementation, old: str) -> torch.nn.Module:
    """Build a module on which the name ``x`` already stands for ``old``."""
    base = impl.Module

    class Host(base):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.zeros(1))
            self.register_buffer("early", torch.zeros(1))
            self.front = child_leaf(impl)

    if old == "class attribute":
        Host.x = "of the class"
    elif old == "class attribute None":
        Host.x = None
    elif old == "method":
        Host.x = lambda self: self
    elif old == "property":
        Host.x = property(lambda self: 5)
    elif old == "settable property":
        Host.x = property(lambda self: 5, lambda self, value: vars(self).update(got=value))
    elif old == "failing property":
        Host.x = property(lambda self: self.missing)
    module = Host()
    members = {
        "plain": lambda: setattr(module, "x", 3),
        "plain None": lambda: setattr(module, "x", None),
        "plain tensor": lambda: setattr(module, "x", torch.zeros(2)),
        "parameter": lambda: setattr(module, "x", torch.nn.Parameter(torch.zeros(2))),
        "parameter None": lambda: module.register_parameter("x", None),
        "buffer": lambda: module.register_buffer("x", torch.zeros(2)),
        "buffer None": lambda: module.register_buffer("x", None),
        "loose buffer": lambda: module.register_buffer("x", torch.zeros(2), persistent=False),
        "loose buffer None": lambda: module.register_buffer("x", None, persistent=False),
        "module": lambda: setattr(module, "x", child_leaf(impl)),
        "module None": lambda: module.add_module("x", None),
    }
    members.get(old, lambda: None)()
    module.last = torch.nn.Parameter(torch.zeros(1))
    module.register_buffer("late", torch.zeros(1))
    module.back = child_leaf(impl)
    return module


OLD = (
    "absent",
    "plain",
    "plain None",
    "plain tensor",
    "parameter",
    "parameter None",
    "buffer",
    "buffer None",
    "loose buffer",
    "loose buffer None",
    "module",
    "module None",
    "class attribute",
    "class attribute None",
    "method",
    "property",
    "settable property",
    "failing property",
)

VALUES = {
    "parameter": lambda impl: torch.nn.Parameter(torch.ones(3)),
    "frozen parameter": lambda impl: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "integer parameter": lambda impl: torch.nn.Parameter(torch.ones(3).int(), requires_grad=False),
    "tensor": lambda impl: torch.ones(3),
    "tensor with history": lambda impl: torch.ones(3, requires_grad=True) * 2,
    "buffer": lambda impl: torch.nn.Buffer(torch.ones(3)),
    "loose buffer": lambda impl: torch.nn.Buffer(torch.ones(3), persistent=False),
    "module": child_leaf,
    "torch module": lambda impl: torch.nn.Identity(),
    "None": lambda impl: None,
    "int": lambda impl: 1,
    "bool": lambda impl: True,
    "float": lambda impl: 1.5,
    "str": lambda impl: "text",
    "list": lambda impl: [1],
    "function": lambda impl: len,
    "module class": lambda impl: torch.nn.Identity,
    **({"tensor-like": lambda impl: TensorLike()} if TENSOR_LIKE_BUFFERS else {}),
}

REGISTER = {
    "register_parameter": lambda m, impl: m.register_parameter(
        "x", torch.nn.Parameter(torch.ones(3))
    ),
    "register_parameter None": lambda m, impl: m.register_parameter("x", None),
    "register_buffer": lambda m, impl: m.register_buffer("x", torch.ones(3)),
    "register_buffer loose": lambda m, impl: m.register_buffer("x", torch.ones(3), False),
    "register_buffer None": lambda m, impl: m.register_buffer("x", None),
    "register_buffer falsy": lambda m, impl: m.register_buffer("x", torch.ones(3), persistent=0),
    **(
        {"register_buffer object": lambda m, impl: m.register_buffer("x", TensorLike())}
        if TENSOR_LIKE_BUFFERS
        else {}
    ),
    "register_buffer parameter": lambda m, impl: m.register_buffer(
        "x", torch.nn.Parameter(torch.ones(3))
    ),
    "add_module": lambda m, impl: m.add_module("x", child_leaf(impl)),
    "add_module None": lambda m, impl: m.add_module("x", None),
    "register_module": lambda m, impl: m.register_module("x", child_leaf(impl)),
    "register_module None": lambda m, impl: m.register_module("x", None),
}
