"""ScriptModules of modkit for modules of C++ and of torch: one wrapper for each C++ module."""

import types
from typing import Any, Final

import torch
from torch.nn import Parameter

from modkit.jit._attributes import BOOKKEEPING, CONTAINER, bind
from modkit.jit._upstream import (
    ModuleDict,
    ScriptMethod,
    TorchRecursiveScriptModule,
    TorchTopLevelTracedModule,
    TorchTracedModule,
)


# Entries of a torch wrapper's dict that are not copied. Those of containers, and properties, lead
# to the original module; modkit finds them through C++ and the children.
_NOT_COPIED: Final = BOOKKEEPING.union(
    ("_c", "_concrete_type", "_initializing", "training", "keys", "values", "items"),
    ("__iter__", "__len__", "__getitem__", "__contains__", "__dir__"),
)

# Modkit's class for each of torch's classes of wrappers; filled where the classes are defined.
WRAPPERS: Final[dict[type, Any]] = dict.fromkeys(
    (TorchRecursiveScriptModule, TorchTracedModule, TorchTopLevelTracedModule)
)


def blank(cls: Any) -> Any:
    """Return an instance with the state of a new module, whose constructor has not run."""
    module = cls.__new__(cls)
    # Not by its ``__setattr__``, which asks the C++ module that is not there yet.
    module.__dict__.update(vars(torch.nn.Module()))
    return module


def wrap_cpp(cpp: Any, memo: dict[Any, Any] | None = None) -> Any:
    """Return a new wrapper of a C++ module, with wrappers of all below it."""
    memo = {} if memo is None else memo
    if cpp in memo:
        return memo[cpp]
    module = memo[cpp] = blank(WRAPPERS[TorchRecursiveScriptModule])
    bind(module, cpp, {name: wrap_cpp(child, memo) for name, child in ModuleDict(cpp).items()})
    attach_compiled_hooks(module)
    return module


def rewrap(module: Any, cpp: Any) -> None:
    """Make a module the wrapper of another C++ module; the children are new."""
    for name, value in tuple(module.__dict__.items()):
        if isinstance(value, ScriptMethod):
            del module.__dict__[name]
    bind(module, cpp, dict(wrap_cpp(cpp)._modules))


def attach_compiled_hooks(module: Any) -> None:
    """Register the compiled hooks, so that a call from Python runs them."""
    for hook in module._c._get_forward_pre_hooks():
        module.register_forward_pre_hook(hook)
    for hook in module._c._get_forward_hooks():
        module.register_forward_hook(hook)


def wrap_torch(script: Any, source: Any = None, memo: dict[Any, Any] | None = None) -> Any:
    """Wrap the C++ modules of a wrapper of torch, and restore what the compiler forgot.

    It forgets which buffers are not persistent, which children are one module, and what kind of
    container a module is.
    """
    memo = {} if memo is None else memo
    if script._c in memo:
        return memo[script._c]

    module = memo[script._c] = blank(WRAPPERS[type(script)])
    inner = script.__dict__.get("_actual_script_module", script)
    bind(module, inner._c, wrap_children(inner, source, memo), inner.__dict__.get("_concrete_type"))

    # Copy the methods in Python, and the attributes that C++ lacks.
    for name, value in inner.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is inner:
            value = types.MethodType(value.__func__, module)
        if name not in _NOT_COPIED and not isinstance(value, property):
            module.__dict__[name] = value
    if inner is not script:
        module.__dict__["_name"] = script._name
    attach_compiled_hooks(module)

    if isinstance(source, (torch.nn.Sequential, torch.nn.ModuleList)):
        module.__dict__[CONTAINER] = "sequence"
    elif isinstance(source, torch.nn.ModuleDict):
        module.__dict__[CONTAINER] = "mapping"

    transient = getattr(source, "_non_persistent_buffers_set", ())
    module._non_persistent_buffers_set.update(name for name in transient if name in module._buffers)
    return module


def wrap_children(inner: Any, source: Any, memo: dict[Any, Any]) -> dict[str, Any]:
    """Return the wrappers of the children; those that were one module become one again."""
    children: dict[str, Any] = {}
    for name, child in inner.__dict__["_modules"].items():
        # The children of a module that torch has compiled are a mapping without ``get``.
        origin = source._modules[name] if source is not None and name in source._modules else None
        wrapper = memo.get(id(origin)) if origin is not None else None
        # The compiler has made two C++ modules of one, and a C++ module takes one of its own type.
        if wrapper is not None and wrapper._c._type() == child._c._type():
            inner._c.setattr(name, wrapper)
            children[name] = wrapper
            continue

        # A child of a user's class has methods in Python, so it stays.
        children[name] = wrap_torch(child, origin, memo) if type(child) in WRAPPERS else child
        if origin is not None:
            memo[id(origin)] = children[name]
    return children


def make_parameters(module: Any) -> None:
    """Make a Parameter of each leaf that C++ has as a parameter, tied ones staying tied.

    C++ returns plain tensors, and tools tell parameters from other tensors by their class.
    """
    made: dict[int, tuple[torch.Tensor, Parameter]] = {}
    for owner in module.modules():
        for name, tensor in owner._parameters.items():
            if isinstance(tensor, Parameter) or not tensor.is_leaf:
                continue

            if id(tensor) not in made:
                parameter = Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
                parameter.grad = tensor.grad
                made[id(tensor)] = (tensor, parameter)
            owner._parameters[name] = made[id(tensor)][1]
