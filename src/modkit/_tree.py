"""One descent through a tree of modules, for every walk that is not hot."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from modkit._messages import MSG_CYCLE


StateT = TypeVar("StateT")


def descend(
    root: torch.nn.Module,
    state: StateT,
    enter: Callable[[str, Any, StateT], StateT | None],
    leave: Callable[[Any, StateT], object] | None = None,
) -> None:
    """Walk over all modules below ``root``, in the order of ``_modules`` and on every path.

    It does not recurse, so a tree may be as deep as memory allows.
    """
    # An iterator, so that the walk goes on behind a child after all that is below it.
    parent, children = root, iter(root._modules.items())
    # The modules between the root and ``parent``, each with its state and the rest of its children.
    parents: list[Any] = []
    active = {id(root)}

    while True:
        for name, child in children:
            if child is None:
                continue
            entered = enter(name, child, state)
            if entered is None:
                continue

            below = child._modules
            if below:
                # After ``enter``: a module that is skipped handles a cycle itself, as in torch.
                if id(child) in active:
                    refuse_cycle(child)
                active.add(id(child))
                parents.append((parent, state, children))
                parent, state, children = child, entered, iter(below.items())
                break
            if leave is not None:
                leave(child, entered)
        else:
            # All children are done.
            if not parents:
                return
            if leave is not None:
                leave(parent, state)
            active.discard(id(parent))
            parent, state, children = parents.pop()


def refuse_cycle(module: torch.nn.Module) -> None:
    """Raise what an endless recursion would end in, at once and with the reason."""
    raise RecursionError(MSG_CYCLE.format(name=type(module).__name__))
