"""ScriptModules of modkit for modules of C++ and of torch: one wrapper for each C++ module."""

import types
from typing import Any, Final

import torch
from torch.nn import Parameter

from modkit.jit._attributes import BOOKKEEPING, bind
from modkit.jit._upstream import ModuleDict, ScriptMethod, TorchRecursiveScriptModule
from modkit.nn._attributes import fill
from modkit.nn._hooks import add


_OF_CONTAINERS: Final = frozenset(
    ("__iter__", "__len__", "__getitem__", "__contains__", "__dir__", "keys", "values", "items")
)


# The class of modkit for each class of wrappers that torch has; entered where they are defined.
WRAPPERS: Final[dict[type, Any]] = {}


class Memo:
    """The wrappers of one tree: by C++ module, and by the module each was compiled from."""

    def __init__(self) -> None:
        self.by_cpp: dict[Any, Any] = {}
        self.by_source: dict[int, Any] = {}


def blank(cls: Any) -> Any:
    """Return an instance of ``cls`` with the bookkeeping of a module and nothing else."""
    module = cls.__new__(cls)
    fill(module.__dict__)
    return module


def wrap_cpp(cpp: Any, memo: Memo | None = None) -> Any:
    """Return a new wrapper of a C++ module, with wrappers of all below it."""
    memo = memo or Memo()
    if cpp in memo.by_cpp:
        return memo.by_cpp[cpp]
    module = memo.by_cpp[cpp] = blank(WRAPPERS[TorchRecursiveScriptModule])
    children = {name: wrap_cpp(child, memo) for name, child in ModuleDict(cpp).items()}
    bind(module, cpp, children)
    attach_compiled_hooks(module)
    return module


def rewrap(module: Any, cpp: Any) -> None:
    """Make ``module`` the wrapper of another C++ module; the children are new."""
    for name, value in tuple(module.__dict__.items()):
        if isinstance(value, ScriptMethod):
            del module.__dict__[name]
    children = {name: wrap_cpp(child) for name, child in ModuleDict(cpp).items()}
    bind(module, cpp, children)


def attach_compiled_hooks(module: Any) -> None:
    """Enter the hooks that were compiled, so that a call from Python runs them."""
    for hook in module._c._get_forward_pre_hooks():
        add(module._forward_pre_hooks, hook)
    for hook in module._c._get_forward_hooks():
        add(module._forward_hooks, hook)


def wrap_torch(script: Any, source: Any = None, memo: Memo | None = None) -> Any:
    """Return a wrapper of the same C++ modules as ``script``, a wrapper of torch.

    Args:
        script: A module of torch of one of the classes in ``WRAPPERS``, with all below it. A child
            of a user's class stays as it is, since it has methods in Python.
        source: The module that it was compiled from. The compiler forgets which buffers are not
            persistent, and which children are one module.
        memo: The wrappers of this tree so far.
    """
    memo = memo or Memo()
    if script._c in memo.by_cpp:
        return memo.by_cpp[script._c]
    module = memo.by_cpp[script._c] = blank(WRAPPERS[type(script)])
    inner = script.__dict__.get("_actual_script_module", script)
    bind(module, inner._c, wrap_children(inner, source, memo), inner.__dict__.get("_concrete_type"))
    _copy_own_attributes(module, inner)
    if inner is not script:
        module.__dict__["_name"] = script._name
    attach_compiled_hooks(module)
    if source is not None:
        keep_transient(module, source)
    return module


def wrap_children(inner: Any, source: Any, memo: Memo) -> dict[str, Any]:
    """Return the wrappers of the children; those that were one module become one again."""
    children: dict[str, Any] = {}
    for name, child in inner.__dict__["_modules"].items():
        # What torch has compiled before has a mapping with little more than item access.
        origin: Any = None
        if source is not None and name in source._modules:
            origin = source._modules[name]
        known = memo.by_source.get(id(origin)) if origin is not None else None
        if known is not None and known._c._type() == child._c._type():
            inner._c.setattr(name, known)
            children[name] = known
            continue
        bare = type(child) in WRAPPERS
        children[name] = wrap_torch(child, origin, memo) if bare else child
        if origin is not None:
            memo.by_source[id(origin)] = children[name]
    return children


def _copy_own_attributes(module: Any, inner: Any) -> None:
    """Take over what torch's wrapper has in Python: methods, and attributes that C++ lacks."""
    for name, value in inner.__dict__.items():
        if name in BOOKKEEPING or name in {"_c", "_concrete_type", "_initializing", "training"}:
            continue
        if isinstance(value, ScriptMethod):
            module.__dict__[name] = value
        elif isinstance(value, property) or name in _OF_CONTAINERS:
            # Both are found through C++ and the children; torch's lead to the original module.
            continue
        elif isinstance(value, types.MethodType) and value.__self__ is inner:
            module.__dict__[name] = types.MethodType(value.__func__, module)
        else:
            module.__dict__[name] = value


def keep_transient(module: Any, source: Any) -> None:
    """Note which buffers are not persistent."""
    names = getattr(source, "_non_persistent_buffers_set", ())
    module._non_persistent_buffers_set.update(name for name in names if name in module._buffers)


def make_parameters(module: Any) -> None:
    """Make a Parameter of each leaf that C++ has as a parameter, tied ones staying tied."""
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
