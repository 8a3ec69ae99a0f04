"""Attributes of a compiled module: C++ holds them, and a few Python objects beside it."""

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
    text = f"of a script module: '{name}' is a {kind} of its compiled type"
    raise RuntimeError(f"cannot delete methods or parameters {text}")


def _refuse_addition(kind: str, added: str) -> NoReturn:
    text = f"Can't add a new {kind} after ScriptModule construction. Tried to add {added}"
    raise RuntimeError(text)


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
        self._cpp, self.data = cpp, wrappers

    def items(self) -> ItemsView[str, Any]:
        return self.data.items()

    def values(self) -> ValuesView[Any]:
        return self.data.values()

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self and not self._cpp.contains(name):
            _refuse_addition("child", f"'{name}': {value}")
        if not isinstance(value, torch.jit.ScriptModule):
            text = f"non-scripted module, tried to replace existing module '{name}': {value}"
            raise RuntimeError(f"Cannot re-assign modules in a ScriptModule with {text}")  # noqa: TRY004
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
    """Make ``module``, which has the state of a new module, the wrapper of ``cpp``."""
    state = module.__dict__
    state.pop("training", None)
    state["_c"] = cpp
    state["_concrete_type"] = concrete_type or concrete_type_of(cpp._type())
    state["_parameters"] = Tensors(ParameterDict(cpp), "parameter")  # pyright: ignore[reportAbstractUsage]
    state["_buffers"] = Tensors(BufferDict(cpp), "buffer")  # pyright: ignore[reportAbstractUsage]
    state["_modules"] = Children(ModuleDict(cpp), children)


def find(module: Any, name: str) -> Any:
    state = module.__dict__
    cpp, children = state["_c"], state["_modules"]
    if name in children:
        return children[name]
    if cpp.hasattr(name):
        return cpp.getattr(name)
    if cpp._has_method(name):
        method = state[name] = cpp._get_method(name)
        return method
    getter = f"__{name}_getter"
    if cpp._has_method(getter):
        return cpp._get_method(getter)()
    if name in {"keys", "values", "items"} and kind(module) == "mapping":
        return getattr(children, name)
    return cast("Any", torch.nn.Module).__getattr__(module, name)


def assign(module: Any, name: str, value: Any) -> None:
    state = module.__dict__
    cpp, children = state["_c"], state["_modules"]
    if name in BOOKKEEPING:
        state[name] = value
    elif name in children:
        children[name] = value
    elif cpp.hasattr(name):
        cpp.setattr(name, value)
    elif name in state["_concrete_type"].get_constants():
        text = f"Cannot mutate TorchScript constant value: '{name}'. Value: '{value}'"
        raise AttributeError(text)
    elif cpp._has_method(f"__{name}_setter"):
        cpp._get_method(f"__{name}_setter")(value)
    elif isinstance(value, Parameter):
        state["_parameters"][name] = value
    elif isinstance(value, Buffer):
        state["_buffers"][name] = value
    elif isinstance(value, torch.nn.Module):
        children[name] = value
    else:
        object.__setattr__(module, name, value)


def kind(module: Any) -> str | None:
    """Return "sequence", "mapping" or None for the container that the module was compiled from."""
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
    """Return the entries of the instance's own dict that are neither compiled nor views."""
    views = {"_c", "_concrete_type", "_parameters", "_buffers", "_modules"}
    own = ((name, value) for name, value in module.__dict__.items() if name not in views)
    return {name: value for name, value in own if not isinstance(value, ScriptMethod)}
