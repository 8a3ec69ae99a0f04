"""The namespace ``modkit.jit``: names, submodules and ``isinstance``, by reflection."""

import inspect
import types

import pytest
import torch

import modkit.nn
from modkit import jit
from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.jit.networks import build, inputs, jit_tests, make_net, reloaded


pytestmark = jit_tests

MADE_BY_MODKIT = {
    "ScriptModule",
    "freeze",
    "interface",
    "load",
    "optimize_for_inference",
    "save",
    "script",
    "script_method",
    "trace",
    "trace_module",
}


def test_every_name_is_torchs_own_but_those_of_modkit():
    """All attributes of torch.jit are there, private ones and submodules included."""
    names = {name for name in dir(torch.jit) if not name.startswith("__")}
    differing = {name for name in names if getattr(jit, name) is not getattr(torch.jit, name)}

    assert differing == MADE_BY_MODKIT
    assert {getattr(jit, name).__module__ for name in MADE_BY_MODKIT} == {"modkit.jit"}
    assert set(dir(torch.jit)) <= set(dir(jit))
    assert jit.__all__ == torch.jit.__all__


def test_assigning_reaches_torch_but_for_names_of_modkit(monkeypatch):
    """A torch name that is set through modkit is set in torch; ``script`` is modkit's alone."""
    theirs = torch.jit.script
    monkeypatch.setattr(jit, "annotate", "replaced")
    monkeypatch.setattr(jit, "script", "replaced")

    assert (torch.jit.annotate, jit.annotate) == ("replaced", "replaced")
    assert (torch.jit.script, jit.script) == (theirs, "replaced")
    monkeypatch.undo()
    assert jit.annotate is torch.jit.annotate != "replaced"
    assert jit.script is not theirs
    with pytest.raises(AttributeError, match=r"module 'modkit.jit' has no attribute 'compile'"):
        jit.compile


def exporting(impl):
    """Trace a module with an exported method, which torch scripts."""

    class Net(impl.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        @impl.jit.export
        def other(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return impl.jit.trace(Net(), inputs(), check_trace=False)


class Point:
    """A class for TorchScript."""

    def __init__(self, x: int):
        self.x = x


def function(x):
    """Add one."""
    return x + 1


CONSTRUCTORS = {
    "script": lambda impl: build(impl, "scripted"),
    "script twice": lambda impl: impl.jit.script(build(impl, "scripted")),
    "child of script": lambda impl: build(impl, "scripted").lin,
    "trace": lambda impl: build(impl, "traced"),
    "child of trace": lambda impl: build(impl, "traced").lin,
    "trace of exports": exporting,
    "trace_module": lambda impl: impl.jit.trace_module(
        make_net(impl), {"forward": inputs()}, check_trace=False
    ),
    "load": lambda impl: build(impl, "loaded"),
    "child of load": lambda impl: build(impl, "loaded").lin,
    "load of a trace": lambda impl: reloaded(impl, build(impl, "traced")),
    "freeze": lambda impl: build(impl, "frozen"),
    "optimize_for_inference": lambda impl: impl.jit.optimize_for_inference(build(impl, "scripted")),
    "optimize_for_inference of frozen": lambda impl: impl.jit.optimize_for_inference(
        build(impl, "frozen")
    ),
    "class-based": lambda impl: build(impl, "class-based"),
    "child of class-based": lambda impl: build(impl, "class-based").lin,
    "eager": make_net,
    "layer": lambda impl: impl.nn.Linear(1, 1),
    "object": lambda impl: impl.jit.script(Point(1)),
    "function": lambda impl: impl.jit.script(function),
    "traced function": lambda impl: impl.jit.trace(function, inputs()),
    "list": lambda impl: impl.jit.script([1]),
}
CLASSES = {
    name: (getattr(torch.jit, name), getattr(jit, name))
    for name in dir(torch.jit)
    if isinstance(getattr(torch.jit, name), type)
}
CLASSES["nn.Module"] = (torch.nn.Module, modkit.nn.Module)


@for_each("constructor", CONSTRUCTORS)
def test_isinstance_agrees_both_ways(constructor):
    """A result of modkit is an instance of the class of torch's result, under both names."""
    theirs, ours = (CONSTRUCTORS[constructor](impl) for impl in (TORCH, MODKIT))
    expected = {name: isinstance(theirs, torchs) for name, (torchs, _) in CLASSES.items()}

    for value in (theirs, ours):
        for which in (0, 1):
            found = {name: isinstance(value, classes[which]) for name, classes in CLASSES.items()}
            assert found == expected, (type(value), which)
            for name, classes in CLASSES.items():
                assert issubclass(type(value), classes[which]) == expected[name]
    assert sum(expected.values()) >= (0 if constructor == "list" else 1)


def test_a_users_class_is_told_from_its_base():
    """Torch's modules are instances of ScriptModule itself, not of classes derived from it."""

    class Mine(jit.ScriptModule):
        pass

    assert isinstance(Mine(), jit.ScriptModule)
    assert not isinstance(build(TORCH, "scripted"), Mine)
    assert not issubclass(torch.jit.ScriptModule, Mine)
    assert issubclass(Mine, torch.jit.ScriptModule)
    assert not isinstance(torch.nn.Linear(1, 1), jit.ScriptModule)
    assert issubclass(torch.jit.RecursiveScriptModule, jit.ScriptModule)
    assert isinstance(jit, types.ModuleType)


def refused(value, call):
    """Return the type and the text of an error, without the class that it names.

    For a class-based or traced module torch names that of the object behind it.
    """
    try:
        return ("returned", call(value))
    except Exception as error:
        text = str(error).replace(f"'{type(value).__name__}' object", "object")
        return type(error), text.replace("'RecursiveScriptModule' object", "object")


CALLS = {
    "len": len,
    "iter": iter,
    "item": lambda m: m[0],
    "in": lambda m: 1 in m,
    "bool": bool,
    "constant": lambda m: setattr(m, "factor", 4),
    "missing": lambda m: m.missing,
    "extra state": lambda m: m.get_extra_state(),
    "repr": lambda m: repr(m).partition("(")[0],
    "name": lambda m: m.original_name,
}


@for_each("kind", ["scripted", "traced", "loaded", "frozen", "class-based"])
def test_what_a_module_does_not_have_is_refused_as_in_torch(kind):
    """Special methods and constants raise torch's errors, text included."""
    theirs, ours = (
        {name: refused(module, call) for name, call in CALLS.items()}
        for module in (build(impl, kind) for impl in (TORCH, MODKIT))
    )

    assert ours == theirs


# Arguments that torch does not have.
FURTHER = {"load": ("sha256", "strict_extra_files")}


@for_each("name", sorted(MADE_BY_MODKIT - {"ScriptModule"}))
def test_signatures_are_those_of_torch(name):
    """Arguments have torch's names, order, kinds and defaults; further ones have to be named."""
    ours, theirs = (
        inspect.signature(getattr(impl.jit, name)).parameters for impl in (MODKIT, TORCH)
    )
    described = [
        [
            (p.name, p.kind, None if p.name == "_compilation_unit" else p.default)
            for p in one.values()
            if p.name not in FURTHER.get(name, ())
        ]
        for one in (ours, theirs)
    ]

    assert described[0] == described[1]
    assert {ours[each].kind for each in FURTHER.get(name, ())} <= {inspect.Parameter.KEYWORD_ONLY}
