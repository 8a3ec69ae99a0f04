"""Making ScriptModules for what is in C++ already: each C++ module has one object in Python."""

import types
from typing import Any, Final

import torch
from torch.nn import Parameter

from modkit.jit._members import BOOKKEEPING, TRACED, bind
from modkit.jit._upstream import ModuleDict, RecursiveScriptModule, ScriptMethod, TracedModule
from modkit.nn._attributes import fill
from modkit.nn._hooks import add


_OF_CONTAINERS: Final = frozenset(
    ("__iter__", "__len__", "__getitem__", "__contains__", "__dir__", "keys", "values", "items")
)


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


def wrap_cpp(cls: Any, cpp: Any, memo: Memo | None = None) -> Any:
    """Return the wrapper of a C++ module that no object in Python stands for yet."""
    memo = memo or Memo()
    if cpp in memo.by_cpp:
        return memo.by_cpp[cpp]
    module = memo.by_cpp[cpp] = blank(cls)
    children = {name: wrap_cpp(cls, child, memo) for name, child in ModuleDict(cpp).items()}
    bind(module, cpp, children)
    attach_compiled_hooks(module)
    return module


def rewrap(cls: Any, module: Any, cpp: Any) -> None:
    """Let ``module`` stand for another C++ module; the children are new."""
    for name, value in tuple(module.__dict__.items()):
        if isinstance(value, ScriptMethod):
            del module.__dict__[name]
    children = {name: wrap_cpp(cls, child) for name, child in ModuleDict(cpp).items()}
    bind(module, cpp, children)


def attach_compiled_hooks(module: Any) -> None:
    """Enter the hooks that were compiled, so that a call from Python runs them."""
    for hook in module._c._get_forward_pre_hooks():
        add(module._forward_pre_hooks, hook)
    for hook in module._c._get_forward_hooks():
        add(module._forward_hooks, hook)


def is_bare(module: Any) -> bool:
    """Tell whether ``module`` is nothing but torch's wrapper of a C++ module."""
    return isinstance(module, (RecursiveScriptModule, TracedModule))


def wrap_torch(cls: Any, script: Any, source: Any = None, memo: Memo | None = None) -> Any:
    """Return what stands for the same C++ modules as ``script``, a ScriptModule of torch.

    Args:
        cls: The class of the wrappers.
        script: A ScriptModule of torch, with all that is below it. A child of a class that users
            wrote stays as it is, since it has methods in Python.
        source: The module that it was compiled from, which knows what the compiler forgets: which
            buffers are not persistent, and which children are one.
        memo: The wrappers that this tree has already.
    """
    memo = memo or Memo()
    if script._c in memo.by_cpp:
        return memo.by_cpp[script._c]
    module = memo.by_cpp[script._c] = blank(cls)
    inner = script.__dict__.get("_actual_script_module", script)
    bind(
        module,
        inner._c,
        wrap_children(cls, inner, source, memo),
        inner.__dict__.get("_concrete_type"),
    )
    _copy_own_attributes(module, inner)
    attach_compiled_hooks(module)
    if source is not None:
        keep_transient(module, source)
    if isinstance(script, TracedModule):
        module.__dict__[TRACED] = script._name
        if type(script) is TracedModule:
            module.__dict__["forward"] = _refuse_call
    return module


def _refuse_call(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Trace submodules cannot be called.")


def wrap_children(cls: Any, inner: Any, source: Any, memo: Memo) -> dict[str, Any]:
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
        children[name] = wrap_torch(cls, child, origin, memo) if is_bare(child) else child
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
