"""Attributes of a compiled module: C++ holds them, and a few Python objects beside it."""

import operator
from collections import OrderedDict, UserDict
from collections.abc import ItemsView, Iterator, MutableMapping, ValuesView
from typing import Any, Final, NoReturn, cast

import torch
from torch.nn import Buffer, Parameter

from modkit.jit._upstream import (
    BufferDict,
    ModuleDict,
    ParameterDict,
    ScriptMethod,
    TorchTensors,
    concrete_type_of,
)


def _refuse_deletion(name: str, kind: str) -> NoReturn:
    raise RuntimeError(
        f"cannot delete methods or parameters of a script module: '{name}' is a {kind} of its "
        "compiled type"
    )


def _refuse_addition(kind: str, added: str) -> NoReturn:
    raise RuntimeError(
        f"Can't add a new {kind} after ScriptModule construction. Tried to add {added}"
    )


class Tensors(TorchTensors, MutableMapping[str, Any]):  # type: ignore[misc,unused-ignore]
    """The parameters or the buffers of a C++ module; a name whose value is None is not an entry.

    Nothing is cached: each access reads C++, since compiled code may replace a tensor.
    """

    def __init__(self, cpp: Any, kind: str) -> None:
        super().__init__(cpp)
        self._kind = kind

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            _refuse_addition(self._kind, f"'{name}'")
        self._c.setattr(name, value)

    def __delitem__(self, name: str) -> NoReturn:
        _refuse_deletion(name, self._kind)


class Children(UserDict[str, Any]):
    """The children of a C++ module by name, each with its one wrapper in Python."""

    def __init__(self, cpp: Any, wrappers: dict[str, Any]) -> None:
        # UserDict.__init__() would set each child in C++.
        self._cpp = cpp
        self.data = wrappers

    # A mapping's own views look each child up by name; walks of modules read these at each step.
    def items(self) -> ItemsView[str, Any]:
        """Return the names and wrappers of the children."""
        return self.data.items()

    def values(self) -> ValuesView[Any]:
        """Return the wrappers of the children."""
        return self.data.values()

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self and not self._cpp.contains(name):
            _refuse_addition("child", f"'{name}': {value}")
        if not isinstance(value, torch.jit.ScriptModule):
            raise RuntimeError(  # noqa: TRY004 - torch's type
                "Cannot re-assign modules in a ScriptModule with non-scripted module, "
                f"tried to replace existing module '{name}': {value}"
            )
        self._cpp.setattr(name, value)
        self.data[name] = value

    def __delitem__(self, name: str) -> NoReturn:
        _refuse_deletion(name, "child")


# The entries of every module's dict beside ``training``. They never go to C++, where torch sends
# the flag of backward hooks, which then do not run.
BOOKKEEPING: Final = frozenset(vars(torch.nn.Module())) - {"training"}

# The entry of a module's dict for the sources that ``define`` gets before the module is compiled.
# The compiler makes fields of all entries except those that begin with two underscores.
DEFINED: Final = "__defined"

# The entry for the kind of container that a module was compiled from, if that is known.
CONTAINER: Final = "__container"


def bind(module: Any, cpp: Any, children: dict[str, Any], concrete_type: Any = None) -> None:
    """Make a module the wrapper of a C++ module."""
    state = module.__dict__
    state.pop("training", None)
    state["_c"] = cpp
    state["_concrete_type"] = concrete_type or concrete_type_of(cpp._type())

    # ``Tensors`` is not abstract: torch's class, whose type is unknown, has the other methods.
    make: Any = Tensors
    state["_parameters"] = make(ParameterDict(cpp), "parameter")
    state["_buffers"] = make(BufferDict(cpp), "buffer")
    state["_modules"] = Children(ModuleDict(cpp), children)


def find(module: Any, name: str) -> Any:
    """Return what ``name`` is in C++: a child, an attribute, a method or a property's value."""
    state = module.__dict__
    cpp, children = state["_c"], state["_modules"]
    if name in children:
        return children[name]
    if cpp.hasattr(name):
        return cpp.getattr(name)
    if cpp._has_method(name):
        state[name] = cpp._get_method(name)
        return state[name]

    # The compiler keeps the functions of a property under these names.
    getter = f"__{name}_getter"
    if cpp._has_method(getter):
        return cpp._get_method(getter)()

    if name in {"keys", "values", "items"} and kind(module) == "mapping":
        return getattr(children, name)
    return cast("Any", torch.nn.Module).__getattr__(module, name)


def assign(module: Any, name: str, value: Any) -> None:
    """Set what ``name`` is in C++, or a plain attribute that C++ does not know."""
    state = module.__dict__
    cpp, children = state["_c"], state["_modules"]
    if name in BOOKKEEPING:
        state[name] = value
    elif name in children:
        children[name] = value
    elif cpp.hasattr(name):
        cpp.setattr(name, value)
    elif name in state["_concrete_type"].get_constants():
        raise AttributeError(
            f"Cannot mutate TorchScript constant value: '{name}'. Value: '{value}'"
        )
    elif cpp._has_method(f"__{name}_setter"):
        cpp._get_method(f"__{name}_setter")(value)

    elif isinstance(value, torch.jit.Attribute):
        assign(module, name, value.value)
    # A new member is refused by the view that it would be an entry of.
    elif isinstance(value, Parameter):
        state["_parameters"][name] = value
    elif isinstance(value, Buffer):
        state["_buffers"][name] = value
    elif isinstance(value, torch.nn.Module):
        children[name] = value
    else:
        object.__setattr__(module, name, value)


def kind(module: Any) -> str | None:
    """Return the kind of container that a module was compiled from."""
    if CONTAINER in module.__dict__:
        return cast("str", module.__dict__[CONTAINER])
    # Its class is not in an archive; the compiler gives containers only __len__ and __contains__.
    cpp = module.__dict__.get("_c")
    if (
        cpp is None
        or not cpp._has_method("__len__")
        or cpp._has_method("__getitem__")
        or cpp._has_method("__iter__")
        or cpp._get_method("__len__")() != len(module.__dict__["_modules"])
    ):
        return None
    return "mapping" if cpp._has_method("__contains__") else "sequence"


def item(module: Any, index: Any) -> Any:
    """Return the child of a container at an index, or a container of those in a slice."""
    children: Children = module.__dict__["_modules"]
    if kind(module) == "mapping":
        return children[index]
    pairs = list(children.items())
    if not isinstance(index, slice):
        index = operator.index(index)
        if not -len(pairs) <= index < len(pairs):
            raise IndexError(f"index {index} is out of range")
        return pairs[index][1]

    if module._c._has_method("forward"):
        return torch.nn.Sequential(OrderedDict(pairs[index]))
    return torch.nn.ModuleList(child for _, child in pairs[index])


def plain_state(module: Any) -> dict[str, Any]:
    """Return the entries of the instance's own dict that are neither compiled nor views."""
    views = {"_c", "_concrete_type", "_parameters", "_buffers", "_modules"}
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in views and not isinstance(value, ScriptMethod)
    }
