"""What stands in a hook table: an id and a hook, and what the two tell about themselves.

Tables hold the users' own callables under the ids that their handles have, since other libraries
look at both. What torch has no room for is therefore said by the type of the entry, which deepcopy,
pickling and moving an entry to another table keep: a public state-dict hook by the type of its id,
a global pre-hook that takes keyword arguments by the type that holds it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from typing_extensions import Self

from modkit._errors import MSG_GLOBAL_PRE_HOOK_KWARGS, MSG_PRE_HOOK_RESULT
from modkit._upstream import RemovableHandle


Hook = Callable[..., Any]

# The tables of a module whose keys are ids of handles.
TABLES: Final = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def add(
    table: Any, hook: Hook, *, prepend: bool = False, flags: tuple[tuple[Any, bool], ...] = ()
) -> RemovableHandle:
    """Put ``hook`` into ``table`` under a new id, which is also entered in each flag that is set.

    The handle removes the id from the table and from all the flags.
    """
    handle = RemovableHandle(table, extra_dict=[flag for flag, _ in flags])
    table[handle.id] = hook
    for flag, is_set in flags:
        if is_set:
            flag[handle.id] = True
    if prepend:
        table.move_to_end(handle.id, last=False)
    return handle


def reserve_ids(state: Mapping[str, Any]) -> None:
    """Keep new handles from getting the ids in the hook tables of an unpickled module.

    Ids count up from zero in each process, so another process may have given the same ones.
    """
    for name in TABLES:
        for key in state.get(name) or ():
            if isinstance(key, int) and key >= RemovableHandle.next_id:
                RemovableHandle.next_id = int(key) + 1


class PublicHookId(int):
    """The id of a hook from ``register_state_dict_post_hook``; equals the plain number.

    Torch marks the callable instead, for ever, and so cannot take a bound method.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


def add_public_state_dict_hook(table: Any, hook: Any) -> RemovableHandle:
    """Put ``hook`` into ``table`` as one that must return None."""
    if not callable(hook):
        # Torch refuses what it cannot mark, and so refuses most of what cannot be called.
        hook._from_public_api = True
    handle = RemovableHandle(table)
    handle.id = PublicHookId(handle.id)
    table[handle.id] = hook
    return handle


def has_torchs_mark(hook: Hook) -> bool:
    """Tell whether torch's own ``register_state_dict_post_hook`` was given this hook before."""
    return getattr(hook, "_from_public_api", False)


def is_public(hook_id: int, hook: Hook) -> bool:
    """Tell whether a state-dict hook may only edit in place."""
    return isinstance(hook_id, PublicHookId) or has_torchs_mark(hook)


def is_args_and_kwargs(result: object) -> bool:
    """Tell whether ``result`` is what a pre-hook with keyword arguments may return."""
    return (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], (tuple, list))
        and isinstance(result[1], (dict, Mapping))
    )


class KeywordPreHook:
    """A global forward pre-hook that is called with the keyword arguments.

    Modules of torch call what stands in the table with the positional arguments alone.
    """

    __slots__ = ("hook",)

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the hook; for a module of torch, whose keyword arguments stay unseen, without any."""
        if kwargs is not None:
            return self.hook(module, args, kwargs)
        result = self.hook(module, args, {})
        if result is None:
            return None
        if not is_args_and_kwargs(result):
            raise RuntimeError(MSG_PRE_HOOK_RESULT.format(result=result))
        if result[1]:
            raise RuntimeError(MSG_GLOBAL_PRE_HOOK_KWARGS.format(name=type(module).__name__))
        return tuple(result[0])
