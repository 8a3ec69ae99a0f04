"""Iterating over the modules, parameters and buffers of a tree."""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Parameter

from modkit.nn._tree import STANDARD, is_standard, refuse_cycle


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


def _overrides_walk(module: torch.nn.Module) -> bool:
    # ``is_standard`` written out, as this is the inner loop of every walk.
    return type(module).named_modules not in STANDARD or "named_modules" in module.__dict__


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
    stack = [(prefix + "." if prefix else "", module, iter(module._modules.items()))]
    while stack:
        dotted, _, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            path = dotted + name
            if _overrides_walk(child):
                yield from child.named_modules(memo, path, remove_duplicate)
                continue
            if child in memo:
                continue
            if remove_duplicate:
                memo.add(child)
            elif any(child is parent for _, parent, _ in stack):
                # Without removal of duplicates nothing else stops a module that contains itself.
                refuse_cycle(child)
            yield path, child
            if child._modules:
                stack.append((path + "." if path else "", child, iter(child._modules.items())))
                break
        else:
            stack.pop()


def modules(module: torch.nn.Module, remove_duplicate: bool) -> Iterator[torch.nn.Module]:
    """Yield what ``module.named_modules`` finds, without putting names together."""
    if not remove_duplicate or _overrides_walk(module):
        for _, found in module.named_modules(remove_duplicate=remove_duplicate):
            yield found
        return
    memo = {module}
    yield module
    names: list[str] = []
    stack = [iter(module._modules.items())]
    while stack:
        for name, child in stack[-1]:
            if child is None:
                continue
            if _overrides_walk(child):
                for _, found in child.named_modules(memo, _dotted([*names, name]), True):
                    yield found
                continue
            if child in memo:
                continue
            memo.add(child)
            yield child
            if child._modules:
                names.append(name)
                stack.append(iter(child._modules.items()))
                break
        else:
            stack.pop()
            if names:
                names.pop()


def _dotted(names: list[str]) -> str:
    path = ""
    for name in names:
        path = f"{path}.{name}" if path else name
    return path


def parameters(module: torch.nn.Module, recurse: bool) -> Iterator[Parameter]:
    """Yield what ``module.named_parameters`` finds, without putting names together."""
    if (
        not is_standard(module, "named_parameters")
        or not is_standard(module, "_named_members")
        or (recurse and _overrides_walk(module))
    ):
        for _, found in module.named_parameters(recurse=recurse):
            yield found
        return
    # By identity, as tensors compare in a set, but without the hash that tensors define in Python.
    # The values keep what was seen alive, so that no identity is used twice.
    seen: dict[int, Parameter] = {}
    for owner in modules(module, remove_duplicate=True) if recurse else (module,):
        for parameter in owner._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen[id(parameter)] = parameter
                yield parameter


def named_members(
    module: torch.nn.Module,
    get_members_fn: NamedMembers,
    prefix: str,
    recurse: bool,
    remove_duplicate: bool,
) -> Generator[tuple[str, Any], None, None]:
    """Yield the pairs that ``get_members_fn`` finds in ``module`` and, if asked, all below it."""
    owners: Iterable[tuple[str, torch.nn.Module]] = (
        module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        if recurse
        else [(prefix, module)]
    )
    # Tensors by identity, as in ``parameters``; what else a caller's function finds by equality.
    seen_tensors: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    for module_prefix, owner in owners:
        dotted = module_prefix + "." if module_prefix else ""
        for name, member in get_members_fn(owner):
            if member is None:
                continue
            if remove_duplicate:
                if isinstance(member, torch.Tensor):
                    if id(member) in seen_tensors:
                        continue
                    seen_tensors[id(member)] = member
                elif member in seen:
                    continue
                else:
                    seen.add(member)
            yield dotted + name, member


def members_of(
    module: torch.nn.Module,
    get_members_fn: NamedMembers,
    prefix: str,
    recurse: bool,
    remove_duplicate: bool,
) -> Iterator[tuple[str, Any]]:
    """Return an iterator over ``module._named_members``, which an override may have changed."""
    if is_standard(module, "_named_members"):
        return named_members(module, get_members_fn, prefix, recurse, remove_duplicate)
    return _iterate_override(module, get_members_fn, prefix, recurse, remove_duplicate)


def _iterate_override(
    module: torch.nn.Module,
    get_members_fn: NamedMembers,
    prefix: str,
    recurse: bool,
    remove_duplicate: bool,
) -> Iterator[tuple[str, Any]]:
    # A generator, so that the override is called when the first pair is asked for, as in torch.
    yield from module._named_members(
        get_members_fn, prefix=prefix, recurse=recurse, remove_duplicate=remove_duplicate
    )
