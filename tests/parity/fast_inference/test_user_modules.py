"""Users' modules inside the block: `forward` is called directly, and whatever torch would notice counts."""

import sys
import traceback
import warnings
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo.testing import CompileCounter

import modkit
from tests.cases import for_each
from tests.parity.fast_inference.nets import batch, net
from tests.parity.fast_inference.twins import (
    differing_keys,
    left_behind,
    outcome,
    plain,
    same_inside,
)


SLOT = "_compiled_call_impl"


pytestmark = pytest.mark.usefixtures("clean_hooks")


def user_module(impl, forward=lambda self, x: x * 2, **namespace):
    """Make a module of a new class of a user, with these attributes."""
    return type("Net", (impl.nn.Module,), {"forward": forward, **namespace})()


def test_forward_is_called_without_torchs_path(impl):
    """Inside, on classes of torch and of modkit, `_call_impl` does not run; outside it does."""
    model = user_module(impl)
    model.inner = user_module(impl)
    real, calls = nn.Module._call_impl.__code__, []

    def count(frame, event, _argument):
        if event == "call" and frame.f_code is real:
            calls.append(frame)

    def counted():
        calls.clear()
        sys.setprofile(count)
        try:
            model(batch()), model.inner(x=batch())
        finally:
            sys.setprofile(None)
        return len(calls)

    outside = counted()
    with modkit.fast_inference(model):
        inside = counted()

    assert [outside, inside, counted()] == [2, 0, 2]


def passed_on(function):
    """Wrap a function, so that it is another one that does the same."""

    def other(*args, **kwargs):
        return function(*args, **kwargs)

    return other


def own_paths(impl):
    """Return modules that are called by something else than torch's own functions."""
    compiled = user_module(impl)
    compiled.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    return {
        "__call__": user_module(impl, __call__=passed_on(nn.Module.__call__)),
        "_call_impl": user_module(impl, _call_impl=passed_on(nn.Module._call_impl)),
        "_compiled_call_impl": user_module(impl, _compiled_call_impl=lambda *args: args),
        "__getattr__": user_module(impl, __getattr__=passed_on(nn.Module.__getattr__)),
        "__getattribute__": user_module(
            impl, __getattribute__=passed_on(nn.Module.__getattribute__)
        ),
        "scripted": scripted,
        "optimized": torch.compile(user_module(impl), backend="eager"),
        "graph module": fx.symbolic_trace(nn.Sequential(nn.ReLU())),
        "no forward": impl.nn.ModuleList(),
        "container": type("Own", (nn.Sequential,), {"__call__": passed_on(nn.Module.__call__)})(
            nn.ReLU()
        ),
        "compiled": compiled,
    }


def test_modules_with_a_path_of_their_own(impl):
    """Overrides of how a module is called or read, compiled and scripted modules are left alone."""

    def scenario(scope):
        torch._dynamo.reset()
        models = own_paths(impl)
        with scope(nn.ModuleList(models.values())):
            slots = [name for name, model in models.items() if vars(model).get(SLOT) is not None]
            results = {
                name: outcome(lambda model=model: model(batch())) for name, model in models.items()
            }
        return {**results, "slots": slots}

    assert differing_keys(scenario) == []


FORWARDS = {
    "none": lambda self: torch.ones(2),
    "one": lambda self, x: x + 1,
    "two": lambda self, x, y: x + y,
    "default": lambda self, x, times=2: x * times,
    "keyword only": lambda self, x, *, times=2: x * times,
    "positional only": eval("lambda self, x, /, times=3: x * times"),
    "any": lambda self, *args, **kwargs: (args, kwargs),
    "a keyword called self_": lambda self, self_=1: self_,
    "static": staticmethod(lambda x, y=1: x + y),
    "class": classmethod(lambda cls, x: (cls.__name__, x)),
    "property": property(lambda self: lambda x: x - 1),
    "callable": torch.relu,
    "generator": lambda self, x: list((yield x)),
    "string": "not callable",
    "other objects": lambda self, x: {"out": [x, None, "text"], "more": (x,)},
}
ARGUMENTS = {
    "none": ((), {}),
    "one": ((1.5,), {}),
    "two": ((1.5, 2), {}),
    "three": ((1, 2, 3), {}),
    "x by keyword": ((), {"x": 2.5}),
    "times by keyword": ((1.5,), {"times": 4}),
    "both by keyword": ((), {"x": 1, "y": 2}),
    "twice": ((1,), {"x": 2}),
    "unknown": ((1,), {"unknown": 2}),
    "names of a call": ((), {"args": 1, "kwargs": 2, "module": 3}),
    "self_": ((), {"self_": 5}),
}


@for_each("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_arguments(impl, forward):
    """Every way to pass arguments, right or wrong, has the same outcome and error text inside."""

    def scenario(scope):
        model, holder = user_module(impl, forward), nn.Sequential()
        holder.append(model)
        seen = {}
        with scope(holder):
            for name, (args, kwargs) in ARGUMENTS.items():
                call = outcome(lambda args=args, kwargs=kwargs: str(model(*args, **kwargs)))
                seen[name] = [part if "0x" not in str(part) else "address" for part in call]
        return seen

    assert differing_keys(scenario) == []


METHODS = ("forward", "_call_impl", "__call__")


def doubled(function):
    """Wrap a function, so that a call that leaves it out shows."""
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def replaced_method(model, place, name):
    """Return a context in which a method of a class, of its base or of an instance is another one."""
    cls = type(model)
    owner = {"class": cls, "base": cls.__mro__[1], "torch": nn.Module, "instance": model}[place]
    return mock.patch.object(owner, name, doubled(getattr(owner, name)))


@for_each("place", ["class", "base", "torch", "instance"])
@for_each("name", METHODS)
def test_replaced_methods(impl, name, place):
    """A method that is replaced before, inside or around the block, and put back, is called as outside."""

    def scenario(scope):
        base = type("Base", (impl.nn.Module,), {"forward": lambda self, x: x + 1})
        model, seen = type("Net", (base,), {})(), {}
        with scope(model):
            seen["plain"] = model(batch())
            with replaced_method(model, place, name):
                seen["replaced inside"] = model(batch())
            seen["put back inside"] = model(batch())
        patch = replaced_method(model, place, name)
        patch.start()
        with scope(model):
            seen["replaced before"] = model(batch())
            patch.stop()
            seen["put back"] = model(batch())
        return {key: value.tolist() for key, value in seen.items()}

    assert differing_keys(scenario) == []


def hooks_that_a_call_adds_to_itself(scope, impl):
    """Hooks that `forward` registers run in the next call; those it removes still run in this one."""
    log, handles = [], []

    def forward(self, x):
        log.append("forward")
        for handle in handles:
            handle.remove()
        handles[:] = [] if handles else [self.register_forward_hook(lambda *_: log.append("hook"))]
        return x

    model = user_module(impl, forward)
    with scope(model):
        for _ in range(5):
            model(batch())
    return log, left_behind(model)


def test_modules_without_a_table_of_hooks(impl):
    """A module that lacks a table raises torch's error; a table of the class counts."""

    def scenario(scope):
        seen = []
        for name in ("_forward_hooks", "_backward_pre_hooks"):
            model = user_module(impl)
            with scope(model):
                del model.__dict__[name]
                seen += outcome(lambda model=model: model(batch()))[:3]
                setattr(type(model), name, {1: lambda *given: given[-1] * 3})
                seen += outcome(lambda model=model: model(batch()))[:2]
        return seen

    assert "object has no attribute" in str(same_inside(scenario)[1])


def raise_error(self, x):
    """Fail in a user's `forward`."""
    raise ZeroDivisionError("of the user")


def test_tracebacks(impl):
    """An error shows the same frames inside, but for the one of torch's path that is not taken."""

    def frames(scope):
        model = nn.Sequential(nn.ReLU(), user_module(impl, lambda self, x: self.inner(x)))
        model[1].inner = user_module(impl, raise_error)
        with scope(model), pytest.raises(ZeroDivisionError, match="of the user") as caught:
            model[1](batch())
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:]

    outside, inside = frames(plain), frames(modkit.fast_inference)

    path = ["_wrapped_call_impl", "_call_impl"]
    assert outside == [*path, "<lambda>", *path, "raise_error"]
    assert inside == ["call" if name == "_call_impl" else name for name in outside]


def a_slow_forward_of_the_class_runs_while_traced(scope, impl):
    """`torch.jit.trace` of a module calls `_slow_forward`, as torch's own path does."""

    def slow(self, x):
        return nn.Module._slow_forward(self, x) + 1

    holder = user_module(impl, lambda self, x: self.inner(x))
    holder.inner = user_module(impl, _slow_forward=slow)
    with scope(holder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(holder, batch())
        return traced(batch()), holder(batch())


def compiled_frames(scope, impl, hooked, in_place):
    """Compile a network in a scope; return its frames and graphs in order, and the result."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    def breaks(self, x):
        x = self.fc(x)
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    clear_compilation_metrics()
    model = net(impl)
    model.blocks.append(user_module(impl, breaks))
    model.blocks[-1].fc = nn.Linear(6, 6)
    if hooked:
        for module in (model, model.blocks[0]):
            module.register_forward_hook(lambda *given: given[-1] * 2)
    with scope(model), torch.no_grad():
        if in_place:
            model.compile(backend="eager")
        function = model if in_place else torch.compile(model, backend="eager")
        results = [function(batch()).tolist(), function(batch()).tolist(), has_own_slot(model)]
    metrics = [(one.co_name, one.graph_op_count) for one in get_compilation_metrics()]
    return metrics, results[:2], in_place and results[2], has_own_slot(model)


def has_own_slot(model):
    """Return True if an instance has been compiled in place; the block's own function is another."""
    return "dynamo" in str(getattr(vars(model).get(SLOT), "__module__", ""))


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "compile()"])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_compiled_code_has_the_same_frames(impl, hooked, in_place):
    """Compiled inside, a network has the frames and graphs that it has outside; it stays compiled."""
    outside = compiled_frames(plain, impl, hooked, in_place)
    inside = compiled_frames(modkit.fast_inference, impl, hooked, in_place)

    assert outside[0][0][0] == "forward"
    assert outside == inside


def test_a_compiled_child_keeps_its_code(impl):
    """A child that `torch.compile` has returned is not compiled again, and may assign buffers."""

    def count(self, x):
        self.calls = self.calls + 1
        return x + self.calls

    torch._dynamo.reset()
    counter = CompileCounter()
    child = user_module(impl, count)
    child.register_buffer("calls", torch.zeros(()))
    model = nn.Sequential(nn.Identity(), torch.compile(child, backend=counter, fullgraph=True))
    zero = torch.zeros(())
    results = [model(zero)]
    with modkit.fast_inference(model):
        results += [model(zero), model(zero)]

    assert [results, counter.frame_count] == [[1, 2, 3], 1]


def scripted_inside(scope, impl):
    """`torch.jit.script` of a user's network inside gives the same code."""
    model = net(impl).blocks[0]
    with scope(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    with torch.no_grad():
        return scripted.code, scripted(torch.ones(1, 6)), model(torch.ones(1, 6))


SCENARIOS = (
    hooks_that_a_call_adds_to_itself,
    a_slow_forward_of_the_class_runs_while_traced,
    scripted_inside,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_same_inside(impl, scenario):
    """Results, and members that are left behind, are the same inside."""
    result = same_inside(lambda scope: scenario(scope, impl))

    assert result[0] == "returned"
