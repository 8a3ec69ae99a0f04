"""What a ScriptModule was compiled from, and what is compiled into it later."""

import inspect
from collections.abc import Iterable
from typing import Any, Final

import torch

from modkit.jit._class_based import ScriptMeta, define_later
from modkit.jit._members import compiled, defined_elsewhere, later_methods, note_method
from modkit.jit._notice import without_warnings_of_torch
from modkit.jit._upstream import ENABLED, names_of_frame, parse_definition


def forward_of(module: Any) -> Any:
    """Return the compiled method ``forward``."""
    cpp = compiled(module)
    if not cpp._has_method("forward"):
        raise AttributeError(f"{cpp._type().name()} has no compiled method 'forward'")
    return cpp._get_method("forward")


def define(module: Any, src: str, *, frames_up: int) -> None:
    """Compile a method into ``module``, or keep it until the module itself is compiled."""
    names = names_of_frame(frames_up=frames_up + 1)
    cpp = module.__dict__.get("_c")
    if cpp is None:
        define_later(module, src, names)
        return
    name = parse_definition(src).name().name
    known = later_methods(cpp).get(name)
    if known is not None and known != src and defined_elsewhere(module, name):
        raise RuntimeError(
            f"cannot define '{name}': another module that was compiled from "
            f"{module.original_name} has a method of that name with other code, and the two have "
            "their compiled type in common"
        )
    if known is None or not defined_elsewhere(module, name):
        with without_warnings_of_torch():
            cpp._define(module._concrete_type, src, names)
    note_method(module, name, src)


def without_type(module: Any, name: str, value: Any) -> Any:
    """Return the value of a ``torch.jit.Attribute``, whose type is noted on the class."""
    if not ENABLED or not isinstance(value, torch.jit.Attribute):
        return value
    cls = type(module)
    if "__annotations__" not in cls.__dict__:
        # The compiler reads those of exactly one class, so what users' bases declare comes along.
        theirs = [base for base in cls.__mro__ if isinstance(base, ScriptMeta)]
        inherited = [inspect.get_annotations(b) for b in theirs if not is_ours(b)]
        cls.__annotations__ = {k: v for found in reversed(inherited) for k, v in found.items()}
    cls.__annotations__[name] = value.type
    return value.value


def is_ours(cls: type) -> bool:
    """Tell whether modkit has the class, not users."""
    return "_disable_script_meta" in cls.__dict__


def is_class_based(module: Any) -> bool:
    """Tell whether users have written the class."""
    return not is_ours(type(module))


def special(module: Any, name: str, *args: Any) -> Any:
    """Call a compiled special method, or raise as torch does where there is none."""
    cpp = module.__dict__.get("_c")
    if cpp is not None and cpp._has_method(name):
        return cpp._get_method(name)(*args)
    message = f"'{module._get_name()}' object has no compiled method {name}"
    if is_class_based(module):
        raise TypeError(message)
    raise NotImplementedError(message)


_GETTER: Final = "_getter"


def names_of(module: Any, names: Iterable[str]) -> list[str]:
    """Return the sorted ``names`` with those of compiled methods, properties and attributes."""
    cpp = module.__dict__.get("_c")
    if cpp is None:
        return sorted(names)
    methods = [name for name in cpp._method_names() if not defined_elsewhere(module, name)]
    properties = [
        method[2 : -len(_GETTER)]
        for method in methods
        if method.startswith("__") and method.endswith(_GETTER)
    ]
    attributes = module._concrete_type.get_attributes()
    return sorted({*names, *methods, *properties, *attributes})
