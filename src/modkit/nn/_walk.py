"""Iterating over the modules, parameters and buffers of a tree."""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from modkit.nn._tree import is_standard, refuse_cycle


NamedMembers = Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]


def named_parameters_of(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Return the pairs of one module's own parameters, ``None`` slots included."""
    return module._parameters.items()


def named_buffers_of(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Return the pairs of one module's own buffers, ``None`` slots included."""
    return module._buffers.items()


def named_children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the pairs of the direct children, each module once."""
    seen: set[torch.nn.Module] = set()
    for name, child in module._modules.items():
        if child is not None and child not in seen:
            seen.add(child)
            yield name, child


def named_modules(
    module: torch.nn.Module,
    memo: set[torch.nn.Module] | None,
    prefix: str,
    remove_duplicate: bool,
) -> Generator[tuple[str, torch.nn.Module], None, None]:
    """Yield the pairs of ``module`` and all below it, parents first, depth first.

    ``memo`` holds the modules that were seen and is filled when duplicates are removed.
    """
    if memo is None:
        memo = set()
    if module in memo:
        return
    if remove_duplicate:
        memo.add(module)
    yield prefix, module
    # Without removal of duplicates nothing stops a module that contains itself, so the modules
    # between the root and here are tracked.
    active = {id(module)}
    stack = [(prefix + "." if prefix else "", module, iter(module._modules.items()))]
    while stack:
        dotted, parent, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            path = dotted + name
            if not is_standard(child, "named_modules"):
                yield from child.named_modules(memo, path, remove_duplicate)
                continue
            if child in memo:
                continue
            if remove_duplicate:
                memo.add(child)
            elif id(child) in active:
                refuse_cycle(child)
            active.add(id(child))
            yield path, child
            stack.append((path + "." if path else "", child, iter(child._modules.items())))
            break
        else:
            stack.pop()
            active.discard(id(parent))


def named_members(
    module: torch.nn.Module,
    get_members_fn: NamedMembers,
    prefix: str,
    recurse: bool,
    remove_duplicate: bool,
) -> Generator[tuple[str, Any], None, None]:
    """Yield the pairs that ``get_members_fn`` finds in ``module`` and, if asked, all below it."""
    modules: Iterable[tuple[str, torch.nn.Module]] = (
        module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        if recurse
        else [(prefix, module)]
    )
    seen: set[Any] = set()
    for module_prefix, owner in modules:
        dotted = module_prefix + "." if module_prefix else ""
        for name, member in get_members_fn(owner):
            if member is None or member in seen:
                continue
            if remove_duplicate:
                seen.add(member)
            yield dotted + name, member
