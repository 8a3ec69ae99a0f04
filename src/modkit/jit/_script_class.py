"""Objects of TorchScript classes, with each special method going to the one of its own name."""

from typing import Any, Final, cast

from modkit.jit._upstream import RecursiveScriptClass as TorchScriptClass, magic_methods


class ScriptClass(TorchScriptClass):  # type: ignore[misc,valid-type,unused-ignore]
    """An object of a scripted class: its attributes and methods are those of the C++ object.

    Differs from torch: there every special method runs the class's ``__exit__``.
    """


def as_script_class(value: Any) -> Any:
    """Return ``value``, as an object of ours if it is torch's object of a scripted class."""
    if type(value) is TorchScriptClass:
        return ScriptClass(value._c)
    return value


# What Python does where a class has no such method.
def _is_true(script: Any) -> bool:
    return len(script) > 0 if script._c._has_method("__len__") else True


_DEFAULTS: Final[dict[str, Any]] = {
    "__eq__": object.__eq__,
    "__ne__": object.__ne__,
    "__str__": object.__str__,
    "__bool__": _is_true,
}
# What Python asks for once more with the operands exchanged, or refuses in its own words.
_OPERATORS: Final = frozenset(
    f"__{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "pow",
        "truediv",
        "mod",
        "and",
        "or",
        "xor",
        "lt",
        "gt",
        "le",
        "ge",
    ]
)


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
