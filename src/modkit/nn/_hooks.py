"""Hook tables, and the methods that register a hook on one module.

Tables hold the users' own callables under the ids that their handles have, since other libraries
read both. The methods that only enter a hook into a table are torch's own, inherited.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from typing_extensions import Self

from modkit._messages import text_of
from modkit._upstream import RemovableHandle
from modkit.nn._overrides import TorchModule, patchable, standard


Hook = Callable[..., Any]

# The tables of a module whose keys are ids of handles.
TABLES: Final = (
    *("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def add(table: Any, hook: Hook, *, prepend: bool = False) -> RemovableHandle:
    """Put ``hook`` into ``table`` under a new id."""
    handle = RemovableHandle(table)
    table[handle.id] = hook
    if prepend:
        table.move_to_end(handle.id, last=False)
    return handle


def reserve_ids(state: Mapping[str, Any]) -> None:
    """Keep new handles from getting ids of an unpickled module: each process counts from zero."""
    for name in TABLES:
        for key in state.get(name) or ():
            if isinstance(key, int):
                # No call between the comparison and the write: another thread may get ids in it.
                following = int(key) + 1
                if following > RemovableHandle.next_id:  # noqa: PLR1730
                    RemovableHandle.next_id = following


class PublicHookId(int):
    """The id of a public hook, which survives copies; torch marks the callable instead."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


def is_public(hook_id: int, hook: Hook) -> bool:
    """Return True if a state-dict hook may only edit in place."""
    return isinstance(hook_id, PublicHookId) or getattr(hook, "_from_public_api", False)


def _add_backward_hook(
    module: torch.nn.Module, hook: Hook, *, full: bool, prepend: bool = False
) -> RemovableHandle:
    # Which kind a module takes stays marked when its hooks are gone, and then means nothing.
    if module._is_full_backward_hook is (not full) and module._backward_hooks:
        raise RuntimeError(text_of("register_full_backward_hook", "Cannot use both"))
    module._is_full_backward_hook = full
    return add(module._backward_hooks, hook, prepend=prepend)


@patchable
def register_full_backward_hook(
    self: torch.nn.Module, hook: Hook, prepend: bool = False
) -> RemovableHandle:
    """Run ``hook(module, grad_input, grad_output)`` when gradients have been computed."""
    return _add_backward_hook(self, hook, full=True, prepend=prepend)


@standard
def _get_backward_pre_hooks(self: torch.nn.Module) -> list[Hook]:
    """Return the full backward pre-hooks of a call, global ones first."""
    hooks = TorchModule._get_backward_pre_hooks(self)
    return [functools.partial(_as_tuple, hook) for hook in hooks]


def _as_tuple(hook: Hook, module: torch.nn.Module, gradients: Any) -> Any:
    # Torch would take a tensor, which its documentation allows, apart into rows.
    result = hook(module, gradients)
    return (result,) if isinstance(result, torch.Tensor) else result


@patchable
def register_backward_hook(self: torch.nn.Module, hook: Hook) -> RemovableHandle:
    """Register a backward hook of the deprecated kind; prefer the full one."""
    return _add_backward_hook(self, hook, full=False)


@patchable
def register_state_dict_post_hook(self: torch.nn.Module, hook: Hook) -> RemovableHandle:
    """Run ``hook(module, state_dict, prefix, local_metadata)``, which edits in place."""
    if not callable(cast("object", hook)):
        # Torch refuses what it cannot mark, and so refuses most of what cannot be called.
        cast("Any", hook)._from_public_api = True
    handle = RemovableHandle(self._state_dict_hooks)
    handle.id = PublicHookId(handle.id)
    self._state_dict_hooks[handle.id] = hook
    return handle


@patchable
def _register_state_dict_hook(self: torch.nn.Module, hook: Hook) -> RemovableHandle:
    """Register a hook after ``state_dict`` that may, at the root, return another dict."""
    if getattr(hook, "_from_public_api", False):
        raise RuntimeError(text_of("_register_state_dict_hook", "Cannot register the same"))
    return add(self._state_dict_hooks, hook)
