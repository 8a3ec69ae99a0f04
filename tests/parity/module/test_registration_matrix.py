import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf
from tests.parity.module.contents import where


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
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "tensor with history": lambda: torch.ones(3, requires_grad=True) * 2,
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "module": torch.nn.Identity,
    "None": lambda: None,
    "int": lambda: 1,
}


WAYS = {
    "assignment": lambda module, value: setattr(module, "x", value),
    "register_parameter": lambda module, value: module.register_parameter("x", value),
    "add_module": lambda module, value: module.add_module("x", value),
    "register_module": lambda module, value: module.register_module("x", value),
}


@for_each("value", VALUES)
@for_each("old", OLD)
@for_each("way", WAYS)
def test_every_kind_onto_every_kind(way, old, value):
    """Assigning or registering over an existing name lands, or is refused, as in torch."""

    def scenario(impl):
        module = host(impl, old)
        try:
            returned = ("returned", WAYS[way](module, VALUES[value]()))
        except Exception as error:
            returned = ("raised", type(error).__name__, str(error))
        return [returned, where(module, "x"), list(module.state_dict()), vars(module).get("got")]

    assert same(scenario)[0] == "returned"
