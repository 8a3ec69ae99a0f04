"""Walking a tree of modules while honouring what its classes override.

The walks are loops, not recursion: depth costs no Python frames, and an item is not handed up
through one generator per level. A class that overrides the method for which the tree is walked
is called, with torch's signature, instead of being walked through.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from modkit._errors import MSG_CYCLE
from modkit._types import FunctionT
from modkit._upstream import original_methods


# The methods of ``Module`` whose behaviour the walks know: torch's functions as torch wrote them,
# and ours. A library that puts another function into ``torch.nn.Module`` has overridden the method.
STANDARD: Final[set[object]] = set()


def standard(function: FunctionT) -> FunctionT:
    """Mark a method of ``Module``, and the one of torch that it stands for, as not overridden."""
    STANDARD.add(function)
    STANDARD.add(original_methods[function.__name__])
    return function


def is_standard(module: torch.nn.Module, method: str) -> bool:
    """Tell whether neither the class nor the instance of ``module`` overrides ``method``."""
    return getattr(type(module), method) in STANDARD and method not in module.__dict__


class StandardClasses(dict[type, bool]):
    """Tells which classes override none of the given methods; made for one walk.

    Asking ``is_standard`` for each of thousands of modules takes longer than walking does, while
    a tree has few classes. What an instance overrides is still to be asked of each.
    """

    def __init__(self, *methods: str) -> None:
        super().__init__()
        self._methods = methods

    def __missing__(self, cls: type) -> bool:
        """Look at a class that has not been met in this walk."""
        found = all(getattr(cls, method) in STANDARD for method in self._methods)
        self[cls] = found
        return found


def implements(module: torch.nn.Module, method: str) -> bool:
    """Tell whether the class has its own ``method``; what the instance has does not count."""
    inherited = original_methods[method]
    return getattr(type(module), method, inherited) is not inherited


def method_of_module(function: FunctionT) -> FunctionT:
    """Give a function that is itself a method of ``Module`` the name that errors show."""
    function.__qualname__ = original_methods[function.__name__].__qualname__
    return function


def _has_standard_children(module: torch.nn.Module) -> bool:
    return is_standard(module, "children") and is_standard(module, "named_children")


def is_leaf(module: torch.nn.Module) -> bool:
    """Tell whether ``module.children()`` is sure to be empty."""
    return not module._modules and _has_standard_children(module)


def named_children_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the pairs of the direct children, each module once.

    Modules are told apart by identity, as some cannot be hashed. The values keep alive what was
    seen, so that no identity is used twice while a caller replaces children.
    """
    seen: dict[int, torch.nn.Module] = {}
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen[id(child)] = child
            yield name, child


def children_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Iterate as ``module.children()`` does, without its layers of generators."""
    if _has_standard_children(module):
        return registered_children(module)
    return iter(module.children())


def registered_children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Do the same where it is known that the module does not override that."""
    seen: dict[int, torch.nn.Module] = {}
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            seen[id(child)] = child
            yield child


def refuse_cycle(module: torch.nn.Module) -> None:
    """Raise what an endless recursion would end in, at once and with the reason."""
    raise RecursionError(MSG_CYCLE.format(name=type(module).__name__))


def post_order(
    module: torch.nn.Module, method: str, call: Callable[[Any], object]
) -> Iterator[torch.nn.Module]:
    """Yield the descendants of ``module``, then ``module``: children before their parent.

    A module below ``module`` that overrides ``method`` is passed to ``call`` in its turn, and
    neither it nor what is below it is yielded.
    """
    if is_leaf(module):
        yield module
        return
    plain = StandardClasses(method, "children", "named_children")
    active = {id(module)}
    stack = [(module, children_of(module))]
    while stack:
        parent, children = stack[-1]
        for child in children:
            state = child.__dict__
            if plain[type(child)] and not (
                method in state or "children" in state or "named_children" in state
            ):
                if not child._modules:
                    yield child
                    continue
                below = registered_children(child)
            elif is_standard(child, method):
                below = children_of(child)
            else:
                call(child)
                continue
            if id(child) in active:
                refuse_cycle(child)
            active.add(id(child))
            stack.append((child, below))
            break
        else:
            stack.pop()
            active.discard(id(parent))
            yield parent
