"""Operations on hooks beyond registering one: again, with ids from the start, on odd outputs."""

import collections
import dataclasses
from typing import Any, Final

import torch

from tests.property import choices
from tests.property.hook_objects import REGISTRARS, Hook
from tests.property.operations import operation
from tests.property.tree_operations import sum_of
from tests.property.worlds import HookIds


PRIVATE: Final = ("_register_state_dict_hook", "_register_load_state_dict_pre_hook")


@operation(
    choices.integers(0, 9),
    choices.sampled_from([*sorted(REGISTRARS.values()), *PRIVATE * 3]),
    choices.booleans(),
)
def register_again(side: Any, module: Any, number: int, registrar: str, bound: bool) -> None:
    """Register a hook of the module once more, perhaps as a hook of another kind or as a method."""
    tables = (module._state_dict_hooks, module._state_dict_pre_hooks, module._forward_hooks)
    hooks = [hook for table in tables for hook in table.values() if isinstance(hook, Hook)]
    hook = hooks[number % len(hooks)] if hooks else Hook(50, "state_dict_post", "note")
    side.handles.append(getattr(module, registrar)(hook.__call__ if bound else hook))


@operation()
def restart_hook_ids(side: Any, module: Any) -> None:
    """Count the ids of hooks from zero, as a new process does for what it unpickles."""
    HookIds.next_id = 0


Pair = collections.namedtuple("Pair", "first second")


class Own(tuple[Any, ...]):
    """A tuple of a user's class."""

    __slots__ = ()


@dataclasses.dataclass
class Output:
    """An output of a user's class, as of transformers."""

    first: Any


OUTPUTS: Final = {
    "max": lambda x: x.max(0),
    "pair": lambda x: Pair(x, x + 1),
    "tuple": lambda x: (x, None, 3),
    "list": lambda x: [x, x * 2],
    "own": lambda x: Own((x, x)),
    "dict": lambda x: {"first": x},
    "object": Output,
    "nothing": lambda _: None,
}


@operation(
    choices.sampled_from(sorted(OUTPUTS)),
    choices.lists(
        choices.tuples(
            choices.sampled_from(["backward", "backward_pre", "forward"]),
            choices.sampled_from(["note", "change", "odd", "remove"]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def call_with_output(side: Any, module: Any, kind: str, forms: Any) -> Any:
    """Call a new module with hooks, whose output is not a tensor, forward and backward."""

    class Makes(side.impl.Module):
        def forward(self, x: Any) -> Any:
            return OUTPUTS[kind](x * 2)

    made = Makes()
    for ordinal, (hook_kind, effect) in enumerate(forms):
        getattr(made, REGISTRARS[hook_kind])(Hook(-20 - ordinal, hook_kind, effect))
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    output = made(x)
    total = sum_of(output)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return type(output).__name__, output, x.grad
