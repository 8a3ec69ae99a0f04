"""Attributes of a compiled module: C++ holds them, and a few Python objects beside it."""

from collections import OrderedDict
from collections.abc import ItemsView, Iterator, MutableMapping, ValuesView
from typing import Any, Final, NoReturn, cast

import torch
from torch.nn import Buffer, Parameter

from modkit.jit._upstream import (
    BufferDict,
    ModuleDict,
    ParameterDict,
    RecursiveScriptClass as TorchScriptClass,
    ScriptMethod,
    TorchTensors,
    concrete_type_of,
    magic_methods,
)
from modkit.nn._attributes import fill


class Tensors(TorchTensors, MutableMapping[str, Any]):  # type: ignore[misc,unused-ignore]
    """The parameters or the buffers of a C++ module; a name whose value is None is not an entry.

    Each access reads C++, since compiled code may replace a tensor.
    """

    def __init__(self, cpp: Any, kind: str) -> None:
        super().__init__(cpp)
        self._kind = kind

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            raise RuntimeError(
                f"Can't add a new {self._kind} after ScriptModule construction. "
                f"Tried to add '{name}'"
            )
        self._c.setattr(name, value)

    def __delitem__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"cannot delete methods or parameters of a script module: '{name}' is a {self._kind} "
            "of its compiled type"
        )


class Children(MutableMapping[str, Any]):
    """The children of a C++ module by name, each with its one wrapper in Python."""

    __slots__ = ("_cpp", "_wrappers")

    def __init__(self, cpp: Any, wrappers: dict[str, Any]) -> None:
        self._cpp = cpp
        self._wrappers = wrappers

    def items(self) -> ItemsView[str, Any]:
        """Return the pairs of name and wrapper."""
        return self._wrappers.items()

    def values(self) -> ValuesView[Any]:
        """Return the wrappers."""
        return self._wrappers.values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrappers)

    def __len__(self) -> int:
        return len(self._wrappers)

    def __contains__(self, name: object) -> bool:
        return name in self._wrappers

    def __getitem__(self, name: str) -> Any:
        return self._wrappers[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self and not self._cpp.contains(name):
            raise RuntimeError(
                "Can't add a new child after ScriptModule construction. "
                f"Tried to add '{name}': {value}"
            )
        if not isinstance(value, torch.jit.ScriptModule):
            raise RuntimeError(  # noqa: TRY004 - torch's type
                "Cannot re-assign modules in a ScriptModule with non-scripted "
                f"module, tried to replace existing module '{name}': {value}"
            )
        self._cpp.setattr(name, value)
        self._wrappers[name] = value

    def __delitem__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"cannot delete methods or parameters of a script module: '{name}' is a child of its "
            "compiled type"
        )


class ScriptClass(TorchScriptClass):  # type: ignore[misc,valid-type,unused-ignore]
    """An object of a scripted class: its attributes and methods are those of the C++ object.

    Differs from torch: there every special method runs the class's ``__exit__``.
    """


def as_script_class(value: Any) -> Any:
    """Return ``value``, as an object of ours if it is torch's object of a scripted class."""
    if type(value) is TorchScriptClass:
        return ScriptClass(value._c)
    return value


# Python's default where a class has no such method.
def _is_true(script: Any) -> bool:
    return len(script) > 0 if script._c._has_method("__len__") else True


_DEFAULTS: Final[dict[str, Any]] = {
    "__eq__": object.__eq__,
    "__ne__": object.__ne__,
    "__str__": object.__str__,
    "__bool__": _is_true,
}
# Python then tries the reflected method, and raises its own error.
_ARITHMETIC: Final = ("add", "sub", "mul", "pow", "truediv", "mod", "and", "or", "xor")
_OPERATORS: Final = {f"__{name}__" for name in (*_ARITHMETIC, "lt", "gt", "le", "ge")}


def _dispatch(name: str) -> Any:
    def call(self: Any, *args: Any) -> Any:
        if self._c._has_method(name):
            return as_script_class(getattr(self._c, name)(*args))
        if name in _DEFAULTS:
            return _DEFAULTS[name](self, *args)
        if name in _OPERATORS:
            return NotImplemented
        raise TypeError(f"the scripted class '{self._c._type().name()}' has no method {name}")

    call.__name__ = name
    return call


# Set one by one: a class statement with an `__eq__` would lose its `__hash__`.
for _name in magic_methods:
    setattr(cast("Any", ScriptClass), _name, _dispatch(_name))


def _bookkeeping() -> frozenset[str]:
    state: dict[str, Any] = {}
    fill(state)
    return frozenset(state) - {"training"}


# What every module has in its own dict, beside ``training``. It never goes to C++, where torch
# sends the flag of backward hooks, which then do not run.
BOOKKEEPING: Final = _bookkeeping()

# The entry of a module's dict with what ``define`` was given before the module is compiled. The
# compiler makes fields of all entries but those whose names begin with two underscores.
DEFINED: Final = "__defined"


def bind(module: Any, cpp: Any, children: dict[str, Any], concrete_type: Any = None) -> None:
    """Make ``module``, which has the bookkeeping of a module, the wrapper of ``cpp``."""
    state = module.__dict__
    state.pop("training", None)
    state["_c"] = cpp
    state["_concrete_type"] = concrete_type or concrete_type_of(cpp._type())
    state["_parameters"] = Tensors(ParameterDict(cpp), "parameter")  # pyright: ignore[reportAbstractUsage]
    state["_buffers"] = Tensors(BufferDict(cpp), "buffer")  # pyright: ignore[reportAbstractUsage]
    state["_modules"] = Children(ModuleDict(cpp), children)


def is_compiled(module: Any) -> bool:
    """Return True if ``module`` is a compiled module of modkit."""
    return type(module.__dict__.get("_modules")) is Children


def find(module: Any, name: str) -> Any:
    """Return the child, attribute, compiled method or value of a compiled property ``name``.

    A method is cached in the instance's own dict.
    """
    state = module.__dict__
    cpp = state["_c"]
    children = state["_modules"]
    if name in children:
        return children[name]
    if cpp.hasattr(name):
        return as_script_class(cpp.getattr(name))
    if cpp._has_method(name):
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
    elif name in state["_concrete_type"].get_constants():
        raise AttributeError(
            f"Cannot mutate TorchScript constant value: '{name}'. Value: '{value}'"
        )
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


_OF_MAPPINGS: Final = frozenset({"keys", "values", "items"})


def kind(module: Any) -> str | None:
    """Return the container that the module was compiled from: a sequence, a mapping, or None.

    An archive does not hold the class. The compiler gives containers ``__len__``, and mappings
    ``__contains__``, and no other special method.
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
    """Return the entries of the instance's own dict that are neither compiled nor views."""
    views = {"_c", "_concrete_type", "_parameters", "_buffers", "_modules"}
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in views and not isinstance(value, ScriptMethod)
    }
