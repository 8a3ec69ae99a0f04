"""Copies of a ScriptModule, with the class and the leaf parameters that it has."""

import copy
import types
from typing import Any, Final

import torch
from torch.jit import ScriptFunction
from torch.nn import Parameter

from modkit.jit._attributes import Children, bind, plain_state
from modkit.jit._from_torch import blank, wrap_cpp
from modkit.jit._upstream import ModuleDict


# The tables of a module that hold hooks.
_HOOKS: Final = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def shallow(module: Any) -> Any:
    """Return a module of the same class that shares the tensors and the children."""
    new = blank(type(module))
    if "_c" not in module.__dict__:
        new.__dict__.update(module.__dict__)
        return new

    for name, value in plain_state(module).items():
        copied = value.copy() if name in _HOOKS else value
        # A method that is kept in the dict would go on calling the original.
        if isinstance(value, types.MethodType) and value.__self__ is module:
            copied = types.MethodType(value.__func__, new)
        new.__dict__[name] = copied

    new.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    bind(new, copy.copy(module._c), dict(module._modules), module._concrete_type)
    return new


def deep(module: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of the tree, as ``copy.deepcopy`` does for modules that are not compiled."""
    if "_c" not in module.__dict__:
        new = memo[id(module)] = blank(type(module))
        new.__dict__.update(copy.deepcopy(module.__dict__, memo))
        return new

    # All wrappers come first, since hooks and attributes may lead to any module of the tree.
    pairs: list[tuple[Any, Any]] = []
    new = _mirror(module, copy.deepcopy(module._c), memo, pairs)
    for old, copied in pairs:
        _copy_tensors(old, copied, memo)
        # A compiled hook belongs to the type, and cannot be copied.
        hooks = [hook for table in _HOOKS for hook in getattr(old, table).values()]
        memo.update((id(hook), hook) for hook in hooks if isinstance(hook, ScriptFunction))

    for old, copied in pairs:
        copied.__dict__.update(copy.deepcopy(plain_state(old), memo))
    return new


def _mirror(module: Any, cpp: Any, memo: dict[int, Any], pairs: list[tuple[Any, Any]]) -> Any:
    """Return a wrapper of a copied C++ module, of the original's class; note both in ``pairs``."""
    if id(module) in memo:
        return memo[id(module)]

    # A child that torch has wrapped lacks the views to copy from; torch's copy of it loses its
    # class, too. The wrapper that stands for it lives as long as the memo, which has its ``id``.
    source = module if isinstance(module._modules, Children) else wrap_cpp(module._c)
    memo.setdefault(id(memo), []).append(source)

    new = memo[id(module)] = blank(type(source))
    pairs.append((source, new))
    below = dict(ModuleDict(cpp).items())
    children = {k: _mirror(v, below[k], memo, pairs) for k, v in source._modules.items()}
    bind(new, cpp, children, source._concrete_type)
    return new


def _copy_tensors(old: Any, new: Any, memo: dict[int, Any]) -> None:
    """Make the tensors of ``new`` leaves where those of ``old`` are; C++ has cloned them."""
    for name in {*old._parameters, *old._buffers, *old._concrete_type.get_attributes()}:
        source = old._c.getattr(name) if old._c.hasattr(name) else None
        if not isinstance(source, torch.Tensor):
            continue

        if id(source) not in memo:
            copied = new._c.getattr(name)
            if source.is_leaf:
                make = Parameter if isinstance(source, Parameter) else torch.Tensor.requires_grad_
                copied = make(copied.detach(), source.requires_grad)
                copied.grad = copy.deepcopy(source.grad, memo)
            memo[id(source)] = copied
        new._c.setattr(name, memo[id(source)])
