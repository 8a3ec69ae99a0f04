"""Which methods of ``torch.nn.Module`` are overridden: by a class, an instance or a patch.

One contract holds for all of them: whatever torch would call is called. A function that a library
has put into ``torch.nn.Module`` is the method of modkit's modules too, and a mechanism that walks a
tree calls what a class or an instance overrides, with torch's signature, instead of walking on.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from modkit._messages import MSG_CYCLE, add_note
from modkit._upstream import FunctionT, original_methods


TorchModule: Final = torch.nn.Module
is_dynamo_compiling: Final = torch.compiler.is_dynamo_compiling

# The methods whose behaviour the mechanisms know: torch's functions as torch wrote them, and ours.
STANDARD: Final[set[object]] = {
    value for value in original_methods.values() if isinstance(value, types.FunctionType)
}

# Names of methods, each with the function that torch wrote.
Methods = tuple[tuple[str, object], ...]


def standard(function: FunctionT) -> FunctionT:
    """Declare ``function`` as ours for torch's of that name; it looks for a patch of torch's itself."""
    STANDARD.add(function)
    function.__qualname__ = f"Module.{function.__name__}"
    return function


def patchable(function: FunctionT) -> FunctionT:
    """Declare a method of ours that leaves to torch's of that name where it is patched or compiled.

    Compiled code has the graphs that it has with torch: dynamo traces torch's method. What it cannot
    trace it calls, and that is ours.
    """
    name = function.__name__
    original = original_methods[name]

    @functools.wraps(function)
    def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = getattr(TorchModule, name)
        if current is not original or is_dynamo_compiling():
            return current(self, *args, **kwargs)
        try:
            # A plain call takes half the time of one that unpacks, and most have no arguments.
            return function(self, *args, **kwargs) if args or kwargs else function(self)
        except AttributeError as error:
            _note_forgotten_init(error)
            raise

    standard(function)
    return standard(method)  # type: ignore[return-value]


def _note_forgotten_init(error: AttributeError) -> None:
    """Name the cause of an error about the state of a module that has none."""
    # Python sets it, to the module that lacks the attribute.
    module: object = getattr(error, "obj", None)
    if isinstance(module, TorchModule) and "_modules" not in module.__dict__:
        note = f"{type(module).__qualname__}.__init__() must call super().__init__() first."
        if note not in getattr(error, "__notes__", ()):
            add_note(error, note)


def methods(*names: str) -> Methods:
    """Return the argument of ``all_standard`` and ``StandardClasses``."""
    return tuple((name, original_methods[name]) for name in names)


def all_standard(module: torch.nn.Module, asked: Methods) -> bool:
    """Return True if no class, instance or patch overrides one of the methods of ``module``."""
    cls = type(module)
    for name, original in asked:
        if (
            getattr(cls, name, None) not in STANDARD
            or name in module.__dict__
            or getattr(TorchModule, name) is not original
        ):
            return False
    return True


def is_standard(module: torch.nn.Module, method: str) -> bool:
    """Return True if no class, instance or patch overrides ``method`` of ``module``."""
    return all_standard(module, ((method, original_methods[method]),))


class StandardClasses(dict[type, bool]):
    """Caches for one walk which classes override none of the methods; instances still may."""

    def __init__(self, asked: Methods) -> None:
        self._asked = asked

    def __missing__(self, cls: type) -> bool:
        """Check a class that this walk has not met before."""
        found = self[cls] = all(
            getattr(cls, name, None) in STANDARD and getattr(TorchModule, name) is original
            for name, original in self._asked
        )
        return found


_CHILDREN: Final = methods("children", "named_children")


def has_no_children(module: torch.nn.Module) -> bool:
    """Return True if ``module.children()`` is torch's or ours, and finds nothing."""
    return not module._modules and all_standard(module, _CHILDREN)


def named_children(self: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield ``(name, module)`` for the direct children, each module once.

    modkit: Children are compared by identity, not by ``==``: equal ones are all yielded, and they need
    not be hashable.
    """
    # By identity, since some modules cannot be hashed. The values keep alive what was seen, so that
    # no identity is used twice while a caller replaces children.
    seen: dict[int, torch.nn.Module] = {}
    for name, child in self._modules.items():
        if child is not None and id(child) not in seen:
            seen[id(child)] = child
            yield name, child


def _children_of(module: torch.nn.Module) -> Iterator[tuple[object, torch.nn.Module]]:
    # As ``module.children()`` does it, without its layers of generators.
    if all_standard(module, _CHILDREN):
        return named_children(module)
    return enumerate(module.children())


def refuse_cycle(module: torch.nn.Module) -> None:
    """Raise what an endless recursion would end in, at once and with the reason."""
    raise RecursionError(MSG_CYCLE.format(name=type(module).__name__))


def walk(
    module: torch.nn.Module,
    method: str,
    call: Callable[[Any], object],
    *,
    parents_first: bool = False,
) -> Iterator[torch.nn.Module]:
    """Yield ``module`` and all below it; one that overrides ``method`` goes to ``call`` instead."""
    plain = StandardClasses(((method, original_methods[method]), *_CHILDREN))
    active = {id(module)}
    if parents_first:
        yield module
    stack = [(module, _children_of(module))]
    while stack:
        parent, children = stack[-1]
        for _, child in children:
            has_standard_children = plain[type(child)] and not (
                method in (state := child.__dict__)
                or "children" in state
                or "named_children" in state
            )
            if has_standard_children and not child._modules:
                yield child
                continue
            if not has_standard_children and not is_standard(child, method):
                call(child)
                continue
            if id(child) in active:
                refuse_cycle(child)
            active.add(id(child))
            if parents_first:
                yield child
            below = named_children(child) if has_standard_children else _children_of(child)
            stack.append((child, below))
            break
        else:
            stack.pop()
            active.discard(id(parent))
            if not parents_first:
                yield parent
