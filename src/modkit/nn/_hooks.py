"""Registering hooks on one module, and collecting those that a call has to run."""

import warnings
from typing import Any

import torch

from modkit._errors import (
    MSG_MIXED_BACKWARD_HOOKS,
    MSG_NON_FULL_FORWARD_NODES,
    MSG_NON_FULL_INPUT,
    MSG_NON_FULL_MANY_NODES,
    MSG_NON_FULL_NESTED,
    MSG_NON_FULL_RESULT,
    MSG_PUBLIC_STATE_DICT_HOOK,
)
from modkit._upstream import (
    RemovableHandle,
    WrappedHook,
    global_backward_hooks,
    global_backward_hooks_are_full,
    global_backward_pre_hooks,
)
from modkit.nn._hook_entries import Hook, add, add_public_state_dict_hook, has_torchs_mark
from modkit.nn._tree import method_of_module


def add_forward_pre_hook(
    module: torch.nn.Module, hook: Hook, *, prepend: bool, with_kwargs: bool
) -> RemovableHandle:
    """Register a hook that runs before ``forward``."""
    table = module._forward_pre_hooks
    flags = ((module._forward_pre_hooks_with_kwargs, with_kwargs),)
    return add(table, hook, prepend=prepend, flags=flags)


def add_forward_hook(
    module: torch.nn.Module, hook: Hook, *, prepend: bool, with_kwargs: bool, always_call: bool
) -> RemovableHandle:
    """Register a hook that runs after ``forward``."""
    table = module._forward_hooks
    flags = (
        (module._forward_hooks_with_kwargs, with_kwargs),
        (module._forward_hooks_always_called, always_call),
    )
    return add(table, hook, prepend=prepend, flags=flags)


def add_backward_hook(
    module: torch.nn.Module, hook: Hook, *, full: bool, prepend: bool = False
) -> RemovableHandle:
    """Register a backward hook; a module takes full ones or the deprecated kind, not both.

    Which kind it takes stays marked when the hooks are gone, but then says nothing.
    """
    if module._is_full_backward_hook is (not full) and module._backward_hooks:
        raise RuntimeError(MSG_MIXED_BACKWARD_HOOKS)
    module._is_full_backward_hook = full
    return add(module._backward_hooks, hook, prepend=prepend)


def add_state_dict_hook(module: torch.nn.Module, hook: Any, *, public: bool) -> RemovableHandle:
    """Register a hook that runs after ``state_dict``; public ones may only edit in place."""
    if public:
        return add_public_state_dict_hook(module._state_dict_hooks, hook)
    if has_torchs_mark(hook):
        raise RuntimeError(MSG_PUBLIC_STATE_DICT_HOOK)
    return add(module._state_dict_hooks, hook)


def add_load_state_dict_pre_hook(
    module: torch.nn.Module, hook: Hook, *, with_module: bool
) -> RemovableHandle:
    """Register a hook that runs before a module loads; it holds the module weakly."""
    wrapped = WrappedHook(hook, module if with_module else None)
    return add(module._load_state_dict_pre_hooks, wrapped)


@method_of_module
def _get_backward_hooks(self: torch.nn.Module) -> tuple[list[Hook], list[Hook]]:
    """Return the full and the non-full backward hooks of a call, global ones first."""
    full: list[Hook] = []
    non_full: list[Hook] = []
    kinds = {True: full, False: non_full}
    global_kind = global_backward_hooks_are_full()
    if global_kind is not None:
        kinds[global_kind] += global_backward_hooks.values()
    if self._is_full_backward_hook is not None:
        kinds[self._is_full_backward_hook] += self._backward_hooks.values()
    return full, non_full


@method_of_module
def _get_backward_pre_hooks(self: torch.nn.Module) -> list[Hook]:
    """Return the backward pre-hooks of a call, global ones first."""
    return [*global_backward_pre_hooks.values(), *self._backward_pre_hooks.values()]


@method_of_module
def _maybe_warn_non_full_backward_hook(
    self: torch.nn.Module, inputs: Any, result: Any, grad_fn: Any
) -> None:
    """Warn where a non-full backward hook on ``grad_fn`` will not see all gradients.

    Such a hook sits on the last autograd node of the forward, so it is right only for a module
    that is one node between tensors.
    """
    message = _missing_gradients(inputs, result, grad_fn)
    if message is not None:
        warnings.warn(message, FutureWarning, stacklevel=2)


def _as_tensors(value: Any) -> tuple[torch.Tensor, ...] | None:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(item, torch.Tensor) for item in value):
        return value
    return None


def _missing_gradients(inputs: Any, result: Any, grad_fn: Any) -> str | None:
    outputs = _as_tensors(result)
    if outputs is None:
        return MSG_NON_FULL_RESULT
    arguments = _as_tensors(inputs)
    if arguments is None:
        return MSG_NON_FULL_INPUT
    output_nodes = {item.grad_fn for item in outputs if item.grad_fn is not None}
    if not output_nodes or (len(output_nodes) == 1 and grad_fn not in output_nodes):
        return MSG_NON_FULL_NESTED
    if len(output_nodes) > 1:
        return MSG_NON_FULL_MANY_NODES
    input_nodes = {item.grad_fn for item in arguments if item.grad_fn is not None}
    if input_nodes != {node for node, _ in grad_fn.next_functions}:
        return MSG_NON_FULL_FORWARD_NODES
    return None
