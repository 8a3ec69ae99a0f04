"""Copies and pickles of a ScriptModule, with the class and the leaf parameters it has."""

import copy
import types
from typing import Any

import torch
from torch.jit import ScriptFunction
from torch.nn import Parameter

from modkit.jit import _archives
from modkit.jit._attributes import bind, is_compiled, plain_state
from modkit.jit._from_torch import WRAPPERS, Memo, attach_compiled_hooks, blank
from modkit.jit._upstream import ModuleDict, TorchRecursiveScriptModule
from modkit.nn._hooks import TABLES, reserve_ids


def _rebind(value: Any, old: Any, new: Any) -> Any:
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    return value


def _empty(module: Any) -> Any:
    cls: Any = type(module)
    return cls.__new__(cls)


def shallow(module: Any) -> Any:
    """Return a module of the same class that shares the tensors and the children."""
    new = _empty(module)
    if "_c" not in module.__dict__:
        new.__dict__.update(module.__dict__)
        return new
    for name, value in plain_state(module).items():
        kept = value.copy() if name in TABLES else value
        new.__dict__[name] = _rebind(kept, module, new)
    new.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    bind(new, copy.copy(module._c), dict(module._modules), module._concrete_type)
    return new


def deep(module: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of the tree, as ``copy.deepcopy`` does for modules that are not compiled."""
    if "_c" not in module.__dict__:
        new = memo[id(module)] = _empty(module)
        new.__dict__.update(copy.deepcopy(module.__dict__, memo))
        return new
    pairs: list[tuple[Any, Any]] = []
    new = _mirror(module, copy.deepcopy(module._c, {}), memo, pairs)
    for old, copied in pairs:
        _copy_tensors(old, copied, memo)
        for table in TABLES:
            # A compiled hook belongs to the type, and cannot be copied.
            hooks = getattr(old, table).values()
            memo.update((id(hook), hook) for hook in hooks if isinstance(hook, ScriptFunction))
    for old, copied in pairs:
        for name, value in plain_state(old).items():
            kept = (
                types.MethodType(value.__func__, copied)
                if isinstance(value, types.MethodType) and value.__self__ is old
                else copy.deepcopy(value, memo)
            )
            copied.__dict__[name] = kept
    return new


def _mirror(module: Any, cpp: Any, memo: dict[int, Any], pairs: list[tuple[Any, Any]]) -> Any:
    """Put an object in Python before each copied C++ module, of the class that the old one has."""
    if id(module) in memo:
        return memo[id(module)]
    new = memo[id(module)] = _empty(module)
    pairs.append((module, new))
    below = dict(ModuleDict(cpp).items())
    children = {
        name: _mirror(child, below[name], memo, pairs) for name, child in module._modules.items()
    }
    bind(new, cpp, children, module._concrete_type)
    return new


def _copy_tensors(old: Any, new: Any, memo: dict[int, Any]) -> None:
    """Give ``new`` leaves where ``old`` has them: C++ has copied by a step that autograd records."""
    names = {*old._parameters, *old._buffers, *old._concrete_type.get_attributes()}
    for name in names:
        source = old._c.getattr(name) if old._c.hasattr(name) else None
        if not isinstance(source, torch.Tensor):
            continue
        if id(source) not in memo:
            copied = new._c.getattr(name)
            if source.is_leaf:
                copied = _leaf_like(source, copied.detach(), memo)
            memo[id(source)] = copied
        new._c.setattr(name, memo[id(source)])


def _leaf_like(source: torch.Tensor, data: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if isinstance(source, Parameter):
        leaf: torch.Tensor = Parameter(data, requires_grad=source.requires_grad)
    else:
        leaf = data.requires_grad_(source.requires_grad)
    if source.grad is not None:
        leaf.grad = copy.deepcopy(source.grad, memo)
    return leaf


def _pickled_state(module: Any) -> dict[str, Any]:
    """Return the state in Python, without compiled hooks, which the archive holds."""
    state = plain_state(module)
    for name in TABLES:
        hooks = state[name].items()
        state[name] = type(state[name])(
            (key, hook) for key, hook in hooks if not isinstance(hook, ScriptFunction)
        )
    return state


def reduce(module: Any) -> str | tuple[Any, ...]:
    """Describe the module to pickle: the archive, and the class and state of each part."""
    if "_c" not in module.__dict__:
        return object.__reduce_ex__(module, 2)
    parts = {
        path: (type(part), _pickled_state(part))
        for path, part in module.named_modules()
        if is_compiled(part)
    }
    return rebuild, (_archives.to_bytes(module, None), parts)


def rebuild(data: bytes, parts: dict[str, tuple[Any, dict[str, Any]]]) -> Any:
    """Make the module that ``reduce`` has described."""
    cpp, files = _archives.read(data)
    return _archives.finish(_rebuilt(cpp, "", parts, Memo()), files[_archives.RECORD])


def _rebuilt(cpp: Any, path: str, parts: dict[str, tuple[Any, dict[str, Any]]], memo: Memo) -> Any:
    if cpp in memo.by_cpp:
        return memo.by_cpp[cpp]
    # A class-based child of torch has no part of its own.
    cls, state = parts.get(path) or (WRAPPERS[TorchRecursiveScriptModule], {})
    module = memo.by_cpp[cpp] = blank(cls)
    module.__dict__.update(state)
    reserve_ids(state)
    prefix = f"{path}." if path else ""
    below = ModuleDict(cpp).items()
    bind(module, cpp, {n: _rebuilt(child, prefix + n, parts, memo) for n, child in below})
    attach_compiled_hooks(module)
    return module
