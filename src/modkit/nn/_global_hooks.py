"""Registering hooks for all modules at once.

The tables are torch's own: a hook registered here runs for the modules of both libraries. Functions
that would do just what torch's do are not repeated here.
"""

from modkit._errors import MSG_MIXED_GLOBAL_BACKWARD_HOOKS
from modkit._types import BackwardHook, ForwardHook, ForwardPreHook
from modkit._upstream import (
    RemovableHandle,
    global_backward_hooks,
    global_backward_hooks_are_full,
    global_forward_hooks,
    global_forward_hooks_always_called,
    global_forward_hooks_with_kwargs,
    global_forward_pre_hooks,
    set_global_backward_hooks_are_full,
)
from modkit.nn._hook_entries import KeywordPreHook, add


def register_module_forward_pre_hook(
    hook: ForwardPreHook, *, with_kwargs: bool = False
) -> RemovableHandle:
    """Run ``hook(module, args)`` before the ``forward`` of every module, before its own hooks.

    With ``with_kwargs`` the hook is called with ``(module, args, kwargs)`` and returns None or
    both. A plain ``torch.nn.Module`` does not hand over its keyword arguments: for such a module
    ``kwargs`` is empty, and none may be returned.

    Differs from torch: the keyword ``with_kwargs``.
    """
    return add(global_forward_pre_hooks, KeywordPreHook(hook) if with_kwargs else hook)


def register_module_forward_hook(
    hook: ForwardHook, *, with_kwargs: bool = False, always_call: bool = False
) -> RemovableHandle:
    """Run ``hook(module, args, output)`` after the ``forward`` of every module.

    With ``with_kwargs`` the hook is called with ``(module, args, kwargs, output)``. With
    ``always_call`` it runs even if something raised.

    Differs from torch: ``remove()`` leaves nothing behind.
    """
    flags = (
        (global_forward_hooks_with_kwargs, with_kwargs),
        (global_forward_hooks_always_called, always_call),
    )
    return add(global_forward_hooks, hook, flags=flags)


def _add_backward_hook(hook: BackwardHook, *, full: bool) -> RemovableHandle:
    # The mark of a kind outlives its hooks; without hooks it says nothing.
    if global_backward_hooks and global_backward_hooks_are_full() is (not full):
        raise RuntimeError(MSG_MIXED_GLOBAL_BACKWARD_HOOKS)
    set_global_backward_hooks_are_full(full)
    return add(global_backward_hooks, hook)


def register_module_backward_hook(hook: BackwardHook) -> RemovableHandle:
    """Register a backward hook of the deprecated kind for every module; prefer the full one.

    Differs from torch: removing the last hook makes room for the other kind.
    """
    return _add_backward_hook(hook, full=False)


def register_module_full_backward_hook(hook: BackwardHook) -> RemovableHandle:
    """Run ``hook(module, grad_input, grad_output)`` when a module's gradients are computed.

    Raises:
        RuntimeError: there is a global hook of the deprecated kind.

    Differs from torch: removing the last hook makes room for the other kind.
    """
    return _add_backward_hook(hook, full=True)
