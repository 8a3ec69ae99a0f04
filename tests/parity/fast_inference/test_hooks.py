from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tests.cases import for_each
from tests.helpers import clean_global_hooks
from tests.parity.fast_inference.changes import extra
from tests.parity.fast_inference.nets import batch, net, run
from tests.parity.fast_inference.twins import bits, differing_keys, left_behind, outcome


@pytest.fixture(autouse=True)
def _clean_global_hooks() -> Iterator[None]:
    """Leave no global hook behind."""
    with clean_global_hooks():
        yield


TARGETS = ("", "stem", "stem.0", "stem.2", "blocks.1", "blocks.0.fc", "head.1", "head.1.2")

# The method that registers a hook, its keywords, and the hook table.
KINDS = {
    "forward pre": ("register_forward_pre_hook", {}, "_forward_pre_hooks"),
    "forward pre, kwargs": (
        "register_forward_pre_hook",
        {"with_kwargs": True},
        "_forward_pre_hooks",
    ),
    "forward pre, first": ("register_forward_pre_hook", {"prepend": True}, "_forward_pre_hooks"),
    "forward": ("register_forward_hook", {}, "_forward_hooks"),
    "forward, kwargs": ("register_forward_hook", {"with_kwargs": True}, "_forward_hooks"),
    "forward, always": ("register_forward_hook", {"always_call": True}, "_forward_hooks"),
    "full backward": ("register_full_backward_hook", {}, "_backward_hooks"),
    "backward pre": ("register_full_backward_pre_hook", {}, "_backward_pre_hooks"),
    "non-full backward": ("register_backward_hook", {}, "_backward_hooks"),
}
GLOBAL_KINDS = {
    "global forward pre": ("register_module_forward_pre_hook", {}, "_global_forward_pre_hooks"),
    "global forward": ("register_module_forward_hook", {}, "_global_forward_hooks"),
    "global forward, kwargs": (
        "register_module_forward_hook",
        {"with_kwargs": True},
        "_global_forward_hooks",
    ),
    "global forward, always": (
        "register_module_forward_hook",
        {"always_call": True},
        "_global_forward_hooks",
    ),
    "global full backward": ("register_module_full_backward_hook", {}, "_global_backward_hooks"),
    "global backward pre": (
        "register_module_full_backward_pre_hook",
        {},
        "_global_backward_pre_hooks",
    ),
    "global non-full backward": ("register_module_backward_hook", {}, "_global_backward_hooks"),
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
    """Register a hook of a kind."""
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
    for target in TARGETS[1:] if make is recording else ("stem", "stem.0", "blocks.1"):
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


def test_all_hooks_at_once(impl):
    """Hooks of all kinds on all modules run in the same order inside."""

    def scenario(scope):
        model, log, seen = net(impl), [], {}
        names = {module: name for name, module in model.named_modules()}
        with scope(model), clean_global_hooks():
            for kind in ALL_KINDS:
                if "non-full" not in kind:
                    for target in ("",) if kind in GLOBAL_KINDS else TARGETS:
                        register(model, kind, target, recording(log, names, kind))
            seen["results"] = run(model), run(model)
        seen["log"] = log
        return seen

    assert differing_keys(scenario) == []


@contextmanager
def rebound_global_table(name, table):
    """Replace a global hook table for a while."""
    owner = torch_module
    before = getattr(owner, name)
    setattr(owner, name, table)
    try:
        yield
    finally:
        setattr(owner, name, before)


@for_each("kind", GLOBAL_KINDS)
def test_global_tables_that_are_rebound(impl, kind):
    """A global table that another module replaced is the one that is read."""

    def scenario(scope):
        model, log = net(impl), []
        names = {module: name for name, module in model.named_modules()}
        table = OrderedDict({7: recording(log, names, "rebound")})
        with scope(model), rebound_global_table(GLOBAL_KINDS[kind][2], table):
            first = run(model)
            table.clear()
            second = run(model)
        return {"results": (first, second), "log": log}

    assert differing_keys(scenario) == []


def _registers(model, log):
    later = model.head.get_submodule("1.1")
    later.register_forward_hook(lambda *given: log.append(bits(given[1:])))


def _replaces_later(model, log):
    model.head[1][1] = extra()


def _replaces_next(model, log):
    model.head[1] = nn.Sequential(extra())


def _replaces_itself(model, log):
    model.head[0] = nn.Tanh()


def _replaces_the_first(model, log):
    model.stem = nn.Sequential(extra(4))


def _appends(model, log):
    model.head.append(nn.Linear(3, 3))


def _appends_deeper(model, log):
    model.head[1].append(extra())


def _deletes(model, log):
    del model.head[2]


def _assigns_table(model, log):
    model.head._modules = dict(list(model.head._modules.items())[:2])


def _assigns_table_deeper(model, log):
    model.head[1]._modules = {"0": nn.Sigmoid()}


def _trains(model, log):
    model.train()


def _weights(model, log):
    with torch.no_grad():
        model.head[2].weight.mul_(3)


def _assigns_weight(model, log):
    model.head[2].weight = nn.Parameter(torch.ones(3, 6))


def _converts(model, log):
    model.head[1:].double()


def _raises(model, log):
    raise KeyError("in the hook")


def _sets_forward(model, log):
    model.head[2].forward = lambda x: x * 7


def _sets_forward_of_container(model, log):
    model.head[1].forward = lambda x: x * 7


def _calls_again(model, log):
    if len(log) < 3:
        log.append("again")
        model(batch(2))


def _calls_a_part(model, log):
    log.append(bits(model.stem(batch(2))))


def _clears_hooks(model, log):
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def _none(model, log):
    model.head._modules["2"] = None


def _inner_class(model, log):
    model.head[1][0].__class__ = nn.Sigmoid


ACTIONS = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        _registers,
        _replaces_later,
        _replaces_next,
        _replaces_itself,
        _replaces_the_first,
        _appends,
        _appends_deeper,
        _deletes,
        _assigns_table,
        _assigns_table_deeper,
        _trains,
        _weights,
        _assigns_weight,
        _converts,
        _raises,
        _sets_forward,
        _sets_forward_of_container,
        _calls_again,
        _calls_a_part,
        _clears_hooks,
        _none,
        _inner_class,
    )
}


@for_each("action", ACTIONS.values(), ids=ACTIONS.keys())
@for_each("kind", ["forward pre", "forward"])
def test_hook_that_changes_the_network(impl, kind, action):
    """A hook that changes the network has the same effect on this call and on later ones."""
    differing = []
    for target in ("", "blocks.1.fc", "head", "head.0", "head.1.0"):

        def scenario(scope):
            model, log = net(impl), []
            seen = {}

            def hook(module, *arguments):
                log.append("hook")
                handle.remove()
                action(model, log)

            with scope(model):
                handle = getattr(
                    model.get_submodule(target), f"register_{kind.replace(' ', '_')}_hook"
                )(hook)
                seen["first"] = run(model, "no_grad")
                seen["second"] = run(model, "no_grad")
            seen["after"] = run(model, "no_grad")
            seen["log"] = log
            seen["members"] = left_behind(model)
            return seen

        differing += [(target, key) for key in differing_keys(scenario)]

    assert differing == []


@for_each("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_layer_that_changes_the_network(impl, action):
    """A user's layer in a Sequential, which changes the network, has the same effect inside."""

    class Acting(impl.nn.Module):
        def forward(self, x):
            if self.act is not None:
                act, self.act = self.act, None
                act(self.model[0], self.log)
            return x

    differing = []
    for place, index in (("head", 0), ("head.1", 0), ("head.1", 1), ("stem", 3), ("stem", 0)):

        def scenario(scope):
            model, acting, seen = net(impl), Acting(), {}
            acting.model, acting.log, acting.act = (model,), [], action
            model.get_submodule(place).insert(index, acting)
            with scope(model):
                seen["first"] = run(model, "no_grad")
                seen["second"] = run(model, "no_grad")
            seen["log"] = acting.log
            return seen

        differing += [(place, index, key) for key in differing_keys(scenario)]

    assert differing == []


def test_hook_that_enters_and_leaves_scopes(impl):
    """Scopes that hooks enter and leave, out of order, change no result."""

    def scenario(scope):
        model, stack, seen = net(impl), ExitStack(), {}
        model.stem.register_forward_pre_hook(
            lambda *_: stack.enter_context(scope(model.head)) and None
        )
        model.head[0].register_forward_hook(lambda *_: stack.close())
        model.stem[0].register_forward_hook(lambda *_: stack.enter_context(scope(model)) and None)
        outer = ExitStack()
        outer.enter_context(scope(model))
        seen["in the scope"] = run(model), run(model)
        model.blocks[0].register_forward_hook(lambda *_: outer.close())
        seen["the scope ends in the call"] = run(model)
        seen["after"] = run(model)
        seen["members"] = left_behind(model)
        return seen

    assert differing_keys(scenario) == []


def test_hooks_that_raise_in_a_sequential(impl):
    """An `always_call` hook runs, with the same arguments, where a later layer raises."""

    def scenario(scope):
        model, log = net(impl), []
        names = {module: name for name, module in model.named_modules()}
        for target in TARGETS:
            hook = recording(log, names, target)
            model.get_submodule(target).register_forward_hook(hook, always_call=True)
        model.head[2] = nn.Linear(5, 3)
        with scope(model):
            result = outcome(lambda: model(batch()))
            log.append("again")
            return {"result": result, "again": outcome(lambda: model(batch())), "log": log}

    assert differing_keys(scenario) == []
