"""Attributes of a compiled module: C++ holds them, and a few Python objects beside it."""

from collections import OrderedDict
from typing import Any, Final, cast

import torch
from torch.nn import Buffer, Parameter

from modkit.jit._script_class import as_script_class
from modkit.jit._upstream import (
    ENABLED,
    BufferDict,
    ModuleDict,
    ParameterDict,
    ScriptMethod,
    concrete_type_of,
)
from modkit.jit._views import Children, Tensors
from modkit.nn._attributes import fill


def _bookkeeping() -> frozenset[str]:
    state: dict[str, Any] = {}
    fill(state)
    return frozenset(state) - {"training"}


# What every module has in its own dict, beside ``training``. It never goes to C++, where torch
# sends the flag of backward hooks, which then do not run.
BOOKKEEPING: Final = _bookkeeping()

# Where the instance's own dict says what else is known. The compiler makes fields of the type from
# all names but those that begin with two underscores.
TRACED: Final = "__traced"
DEFINED: Final = "__defined"


def bind(module: Any, cpp: Any, children: dict[str, Any], concrete_type: Any = None) -> None:
    """Let ``module`` stand for the C++ module ``cpp``; its own dict has the bookkeeping already."""
    state = module.__dict__
    state.pop("training", None)
    state["_c"] = cpp
    state["_concrete_type"] = concrete_type or concrete_type_of(cpp._type())
    state["_parameters"] = Tensors(ParameterDict(cpp), "parameter")
    state["_buffers"] = Tensors(BufferDict(cpp), "buffer")
    state["_modules"] = Children(ModuleDict(cpp), children)


def compiled(module: Any) -> Any:
    """Return the C++ module, or raise AttributeError while there is none."""
    cpp = getattr(module, "_c", None)
    if cpp is None:
        why = "is not compiled before its constructor has returned"
        if not ENABLED:
            why = "is not compiled, as the environment variable PYTORCH_JIT=0 turns TorchScript off"
        raise AttributeError(f"{type(module).__name__} {why}")
    return cpp


def find(module: Any, name: str) -> Any:
    """Return what ``name`` is in C++: an attribute, a method, or what a compiled property gives.

    A method is put into the instance's own dict, where Python finds it the next time.
    """
    state = module.__dict__
    cpp = state["_c"]
    children = state["_modules"]
    if name in children:
        return children[name]
    if cpp.hasattr(name):
        return as_script_class(cpp.getattr(name))
    if cpp._has_method(name) and not defined_elsewhere(module, name):
        method = state[name] = cpp._get_method(name)
        return method
    getter = f"__{name}_getter"
    if cpp._has_method(getter):
        return cpp._get_method(getter)()
    if name in _OF_MAPPINGS and kind(module) == "mapping":
        return getattr(children, name)
    return cast("Any", torch.nn.Module).__getattr__(module, name)


def assign(module: Any, name: str, value: Any) -> None:
    """Set what ``name`` is in C++, or a plain attribute that C++ does not know."""
    state = module.__dict__
    cpp = state["_c"]
    if name in BOOKKEEPING:
        state[name] = value
    elif name in state["_modules"]:
        state["_modules"][name] = value
    elif cpp.hasattr(name):
        cpp.setattr(name, value)
        if isinstance(value, torch.jit.ScriptModule):
            state["_modules"].note(name, value)
    elif cpp._has_method(f"__{name}_setter"):
        cpp._get_method(f"__{name}_setter")(value)
    elif isinstance(value, Parameter):
        state["_parameters"][name] = value
    elif isinstance(value, Buffer):
        state["_buffers"][name] = value
    elif isinstance(value, torch.nn.Module):
        state["_modules"][name] = value
    else:
        object.__setattr__(module, name, value)


# The methods that were compiled into a type after it was made: by the name of the type, the types of
# that name, each with the source of its methods. All modules of a type have it in common.
_LATER: Final[dict[str, list[tuple[Any, dict[str, str]]]]] = {}
# Where the instance's own dict says which of them are its own.
OWN_METHODS: Final = "__own_methods"


def later_methods(cpp: Any) -> dict[str, str]:
    """Return the methods, by name, that were compiled into the type of ``cpp`` after it was made."""
    kind = cpp._type()
    for known, methods in _LATER.get(kind.qualified_name(), ()):
        if known == kind:
            return methods
    return {}


def note_method(module: Any, name: str, src: str) -> None:
    """Note that ``name`` is a later method of the type, and one of this module's own."""
    kind = module._c._type()
    methods = later_methods(module._c)
    if not methods:
        _LATER.setdefault(kind.qualified_name(), []).append((kind, methods))
    methods[name] = src
    module.__dict__.setdefault(OWN_METHODS, set()).add(name)


def defined_elsewhere(module: Any, name: str) -> bool:
    """Tell whether only other modules of the type were given the method ``name``."""
    return name in later_methods(module._c) and name not in module.__dict__.get(OWN_METHODS, ())


_OF_MAPPINGS: Final = frozenset({"keys", "values", "items"})


def kind(module: Any) -> str | None:
    """Tell which container of modules this was compiled from: a sequence, a mapping, or none.

    Only the compiled methods tell, as an archive does not hold the class: for a container the
    compiler makes those that count and look for children, and no other.
    """
    cpp = module.__dict__.get("_c")
    if cpp is None or not cpp._has_method("__len__"):
        return None
    if cpp._has_method("__getitem__") or cpp._has_method("__iter__"):
        return None
    if cpp._get_method("__len__")() != len(module.__dict__["_modules"]):
        return None
    return "mapping" if cpp._has_method("__contains__") else "sequence"


def item(module: Any, index: Any) -> Any:
    """Return the child of a container at ``index``, or a container of those in a slice."""
    children: Children = module.__dict__["_modules"]
    if kind(module) == "mapping":
        return children[index]
    pairs = list(children.items())
    if not isinstance(index, slice):
        if not -len(pairs) <= index < len(pairs):
            raise IndexError(f"index {index} is out of range")
        return pairs[index][1]
    if module._c._has_method("forward"):
        return torch.nn.Sequential(OrderedDict(pairs[index]))
    return torch.nn.ModuleList(child for _, child in pairs[index])


def plain_state(module: Any) -> dict[str, Any]:
    """Return what stands in the instance's own dict that is neither compiled nor a view."""
    views = {"_c", "_concrete_type", "_parameters", "_buffers", "_modules"}
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in views and not isinstance(value, ScriptMethod)
    }
