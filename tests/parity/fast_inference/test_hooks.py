from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tests.cases import for_each
from tests.parity.fast_inference.nets import batch, extra, net, run
from tests.parity.fast_inference.twins import bits, differing_keys, left_behind


pytestmark = pytest.mark.usefixtures("clean_hooks")


TARGETS = ("stem", "stem.0", "blocks.1", "blocks.0.fc", "head.1.2")

# The method that registers a hook, its keywords, and the hook table.
KINDS = {
    "forward pre": ("register_forward_pre_hook", {}, "_forward_pre_hooks"),
    "forward": ("register_forward_hook", {"with_kwargs": True}, "_forward_hooks"),
    "forward, always": ("register_forward_hook", {"always_call": True}, "_forward_hooks"),
    "full backward": ("register_full_backward_hook", {}, "_backward_hooks"),
    "backward pre": ("register_full_backward_pre_hook", {}, "_backward_pre_hooks"),
    "non-full backward": ("register_backward_hook", {}, "_backward_hooks"),
}
GLOBAL_KINDS = {
    f"global {kind}": (method.replace("register_", "register_module_"), options, f"_global{table}")
    for kind, (method, options, table) in KINDS.items()
}
ALL_KINDS = KINDS | GLOBAL_KINDS


def recording(log, names, note):
    """Make a hook that appends the module's name and what it was called with."""

    def hook(module, *arguments):
        log.append((note, names.get(module), bits(arguments)))

    return hook


def scaling(log, names, note):
    """Make a hook that records, and changes what it may change."""
    record = recording(log, names, note)

    def hook(module, *arguments):
        record(module, *arguments)
        *before, last = arguments
        if isinstance(last, dict):
            return tuple(value * 2 for value in before[0]), last
        if isinstance(last, tuple):
            return tuple(value if value is None else value * 2 for value in last)
        return last * 2

    return hook


def raising(log, names, note):
    """Make a hook that records and raises."""
    record = recording(log, names, note)

    def hook(module, *arguments):
        record(module, *arguments)
        raise ZeroDivisionError(note)

    return hook


HOOKS = {"recording": recording, "scaling": scaling, "raising": raising}


def table_of(model, kind, target):
    """Return what owns the table of a kind of hooks, and the table's name."""
    name = ALL_KINDS[kind][2]
    return (torch_module if kind in GLOBAL_KINDS else model.get_submodule(target)), name


def register(model, kind, target, hook):
    method, keywords, _table = ALL_KINDS[kind]
    owner = torch_module if kind in GLOBAL_KINDS else model.get_submodule(target)
    return getattr(owner, method)(hook, **keywords)


def hooked(scope, impl, kind, target, make):
    """Register a hook before, in and after a scope, remove it, and assign and change its table."""
    model, log, seen = net(impl), [], {}
    names = {module: name for name, module in model.named_modules()}
    note = register(model, kind, target, make(log, names, "before the scope"))
    with scope(model):
        seen["registered before"] = run(model)
        inside = register(model, kind, target, make(log, names, "inside"))
        seen["registered inside"] = run(model)
        note.remove()
        seen["first removed"] = run(model, "no_grad")
        inside.remove()
        seen["both removed"] = run(model)
        owner, table = table_of(model, kind, target)
        old = getattr(owner, table)
        old[12345] = make(log, names, "written into the table")
        seen["written into the table"] = run(model)
        setattr(owner, table, OrderedDict({5: make(log, names, "table assigned")}))
        seen["table assigned"] = run(model)
        setattr(owner, table, old)
        old.clear()
        seen["table emptied"] = run(model)
        last = register(model, kind, target, make(log, names, "last"))
    seen["after the scope"] = run(model)
    last.remove()
    seen["log"] = log
    seen["members"] = left_behind(model)
    return seen


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@for_each("make", HOOKS.values(), ids=HOOKS.keys())
@for_each("kind", KINDS)
def test_hook(impl, kind, make):
    """Hooks of every kind run in the same order and with the same arguments inside."""
    differing = []
    for target in TARGETS if make is recording else ("stem.0", "blocks.1"):
        found = differing_keys(lambda scope: hooked(scope, impl, kind, target, make))
        differing += [(target, key) for key in found]
        torch_module._global_is_full_backward_hook = None

    assert differing == []


@for_each("make", HOOKS.values(), ids=HOOKS.keys())
@for_each("kind", GLOBAL_KINDS)
def test_global_hook(impl, kind, make):
    """Global hooks run for the same modules, in the same order, inside."""

    def scenario(scope):
        torch_module._global_is_full_backward_hook = None
        return hooked(scope, impl, kind, "", make)

    assert differing_keys(scenario) == []


def assign_weight(model):
    """Give the last layer another parameter."""
    model.head[2].weight = nn.Parameter(torch.ones(3, 6))


def raise_error(model):
    """Fail."""
    raise KeyError("in the layer")


def set_forward(layer):
    """Set another function on an instance."""
    layer.forward = lambda x: x * 7


# By name: what a layer does to the network that it is a part of.
ACTIONS = {
    "registers": lambda model: model.head[1][1].register_forward_hook(lambda *given: given[2] * 2),
    "replaces later": lambda model: model.head[1].__setitem__(1, extra()),
    "replaces next": lambda model: model.head.__setitem__(1, nn.Sequential(extra())),
    "replaces first": lambda model: model.head.__setitem__(0, nn.Tanh()),
    "replaces stem": lambda model: setattr(model, "stem", nn.Sequential(extra(4))),
    "appends": lambda model: model.head.append(nn.Linear(3, 3)),
    "appends deeper": lambda model: model.head[1].append(extra()),
    "deletes": lambda model: model.head.__delitem__(2),
    "assigns table": lambda model: setattr(
        model.head, "_modules", dict(list(model.head._modules.items())[:2])
    ),
    "assigns table deeper": lambda model: setattr(model.head[1], "_modules", {"0": nn.Sigmoid()}),
    "trains": lambda model: model.train(),
    "assigns weight": assign_weight,
    "converts": lambda model: model.head[1:].double(),
    "raises": raise_error,
    "sets forward": lambda model: set_forward(model.head[2]),
    "sets forward of a container": lambda model: set_forward(model.head[1]),
    "calls again": lambda model: model(batch(2)),
    "calls a part": lambda model: model.stem(batch(2)),
    "none": lambda model: model.head._modules.__setitem__("2", None),
    "inner class": lambda model: setattr(model.head[1][0], "__class__", nn.Sigmoid),
}


@for_each("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_layer_that_changes_the_network(impl, action):
    """A user's layer in a Sequential, which changes the network, has the same effect inside."""

    class Acting(impl.nn.Module):
        def forward(self, x):
            if self.act is not None:
                act, self.act = self.act, None
                act(self.model[0])
            return x

    differing = []
    for place, index in (("head", 0), ("head.1", 0), ("head.1", 1), ("stem", 3), ("stem", 0)):

        def scenario(scope):
            model, acting, seen = net(impl), Acting(), {}
            acting.model, acting.act = (model,), action
            model.get_submodule(place).insert(index, acting)
            with scope(model):
                seen["first"] = run(model, "no_grad")
                seen["second"] = run(model, "no_grad")
            seen["members"] = left_behind(model)
            return seen

        differing += [(place, index, key) for key in differing_keys(scenario)]

    assert differing == []
