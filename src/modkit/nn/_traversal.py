"""Iterating over the modules, parameters and buffers of a tree."""

import functools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final, cast

import torch
from torch.nn import Parameter

from modkit._upstream import original_methods
from modkit.nn._overrides import (
    StandardClasses,
    all_standard,
    methods,
    refuse_cycle,
)


NamedMembers = Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]

_NAMED_MODULES: Final = methods("named_modules")
_NAMED_MEMBERS: Final = methods("_named_members")
_NAMED_PARAMETERS: Final = methods("named_parameters", "_named_members")


class _Memo(set[torch.nn.Module]):
    """A set of modules for overrides of ``named_modules`` to pass on, with what it cannot hold."""

    unlike: dict[int, torch.nn.Module]


class _Seen:
    """The modules that a walk has met, told apart by identity.

    A set goes by the equality that the modules' classes define, which is quick, as most leave it
    alone. ``unlike`` holds the others, by identity: modules that cannot be hashed, such as
    dataclasses and mappings, and those that their class takes for equal to another one. In a memo
    that a caller made it is the caller's way of comparing that counts, where it is possible.
    """

    __slots__ = ("_by_identity", "_remember", "met", "unlike")

    def __init__(self, memo: set[torch.nn.Module] | None, *, remember: bool) -> None:
        self.met: set[torch.nn.Module] = set() if memo is None else memo
        self.unlike = memo.unlike if isinstance(memo, _Memo) else {}
        self._by_identity = memo is None or isinstance(memo, _Memo)
        self._remember = remember

    def is_new(self, module: torch.nn.Module) -> bool:
        """Tell whether ``module`` is met for the first time, and note it."""
        try:
            known = module in self.met
        except TypeError:
            if not self._by_identity and type(module).__hash__ is not cast("object", None):
                raise
            known = True
        if known:
            return self.is_another(module)
        if self._remember:
            self.met.add(module)
        return True

    def is_another(self, module: torch.nn.Module) -> bool:
        """Tell whether a module is new although the set seems to hold it, or could not say."""
        hashing = cast("object", type(module).__hash__)
        if hashing is object.__hash__ or id(module) in self.unlike:
            return False
        if hashing is not None and (
            not self._by_identity or any(module is each for each in self.met)
        ):
            return False
        if self._remember:
            self.unlike[id(module)] = module
        return True

    def share(self) -> set[torch.nn.Module]:
        """Return the memo for an override; from then on the walk uses it too."""
        if self._by_identity and not isinstance(self.met, _Memo):
            self.met = memo = _Memo(self.met)
            memo.unlike = self.unlike
        return self.met


_Level = tuple[str, torch.nn.Module, Iterator[tuple[str, torch.nn.Module | None]]]


def _dot(path: str) -> str:
    return path + "." if path else ""


def _refuse_parent(module: torch.nn.Module, stack: list[_Level]) -> None:
    """Raise if ``module`` contains itself: with duplicates kept nothing else ends such a walk."""
    if any(module is parent for _, parent, _ in stack):
        refuse_cycle(module)


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
        yield prefix, module
        if not module._modules:
            return
    seen = _Seen(memo, remember=remove_duplicate)
    new = seen.is_new(module)
    if memo is not None:
        if not new:
            return
        yield prefix, module
    met = seen.met
    note = met.add
    standard = StandardClasses(_NAMED_MODULES)
    stack: list[_Level] = [(_dot(prefix), module, iter(module._modules.items()))]
    while stack:
        dotted, _, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            path = dotted + name
            # ``is_standard`` and ``is_new`` written out, as this is the inner loop.
            if not standard[type(child)] or "named_modules" in child.__dict__:
                met = seen.share()
                note = met.add
                yield from child.named_modules(met, path, remove_duplicate)
                continue
            try:
                known = child in met
            except TypeError:
                known = True
            if known and not seen.is_another(child):
                continue
            if not remove_duplicate:
                _refuse_parent(child, stack)
            elif not known:
                note(child)
            yield path, child
            below = child._modules
            if below:
                stack.append((_dot(path), child, iter(below.items())))
                break
        else:
            stack.pop()


def _path(
    parents: list[torch.nn.Module],
    child: torch.nn.Module,
    stack: list[Iterator[torch.nn.Module | None]],
    names: dict[int, list[str]],
) -> str:
    """Return the dotted path to ``child``, where the iterators over the children stand.

    ``names`` keeps the names of the children of each parent, so that all are listed only once.
    """
    path = ""
    for parent, below, children in zip(parents, [*parents[1:], child], stack, strict=True):
        left = operator.length_hint(children, -1)
        if left < 0:
            # Not an exact dict: such iterators cannot tell how far they are.
            name = next(name for name, found in parent._modules.items() if found is below)
        else:
            if id(parent) not in names:
                names[id(parent)] = list(parent._modules)
            name = names[id(parent)][-1 - left]
        path = f"{path}.{name}" if path else name
    return path


def modules(module: torch.nn.Module, remove_duplicate: bool) -> Iterator[torch.nn.Module]:
    """Yield what ``module.named_modules`` finds, without putting names together."""
    if not remove_duplicate:
        for _, found in module.named_modules(remove_duplicate=False):
            yield found
    elif all_standard(module, _NAMED_MODULES):
        yield from _standard_modules(module)
    else:
        # What torch passes to an override depends on its release.
        yield from original_methods["modules"](module)


def _standard_modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``module``, which does not override ``named_modules``, and all below it, each once."""
    yield module
    if not module._modules:
        return
    seen = _Seen(None, remember=True)
    seen.is_new(module)
    met = seen.met
    note = met.add
    names: dict[int, list[str]] = {}
    standard = StandardClasses(_NAMED_MODULES)
    parents = [module]
    stack = [iter(module._modules.values())]
    while stack:
        for child in stack[-1]:
            if child is None:
                continue
            # As in ``named_modules``.
            if not standard[type(child)] or "named_modules" in child.__dict__:
                met = seen.share()
                note = met.add
                path = _path(parents, child, stack, names)
                for _, found in child.named_modules(met, path, True):
                    yield found
                continue
            try:
                if child not in met:
                    note(child)
                elif not seen.is_another(child):
                    continue
            except TypeError:
                if not seen.is_another(child):
                    continue
            yield child
            below = child._modules
            if below:
                parents.append(child)
                stack.append(iter(below.values()))
                break
        else:
            stack.pop()
            parents.pop()


def parameters(module: torch.nn.Module, recurse: bool) -> Iterator[Parameter]:
    """Yield what ``module.named_parameters`` finds, without putting names together."""
    if not all_standard(module, _NAMED_PARAMETERS) or (
        recurse and not all_standard(module, _NAMED_MODULES)
    ):
        for _, found in module.named_parameters(recurse=recurse):
            yield found
        return
    # By identity, as tensors compare in a set, but without the hash that tensors define in Python.
    # The values keep what was seen alive, so that no identity is used twice.
    seen: dict[int, Parameter] = {}
    for owner in _standard_modules(module) if recurse else (module,):
        for parameter in owner._parameters.values():
            if parameter is None:
                continue
            key = id(parameter)
            if key not in seen:
                seen[key] = parameter
                yield parameter


def named_children(module: torch.nn.Module) -> Generator[tuple[str, torch.nn.Module], None, None]:
    """Yield the pairs of the direct children, each module once, told apart by identity."""
    # The values keep alive what was seen, so that no identity is used twice.
    seen: dict[int, torch.nn.Module] = {}
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen[id(child)] = child
            yield name, child


def _owners(
    module: torch.nn.Module, prefix: str, recurse: bool, remove_duplicate: bool
) -> Iterable[tuple[str, torch.nn.Module]]:
    if not recurse:
        return [(prefix, module)]
    owners: Iterable[tuple[str, torch.nn.Module]] = module.named_modules(
        prefix=prefix, remove_duplicate=remove_duplicate
    )
    return owners


def named_members(
    module: torch.nn.Module,
    get_members_fn: NamedMembers,
    prefix: str,
    recurse: bool,
    remove_duplicate: bool,
) -> Generator[tuple[str, Any], None, None]:
    """Yield the pairs that ``get_members_fn`` finds in ``module`` and, if asked, all below it."""
    # Tensors and modules by identity, as in ``parameters``; anything else by its own equality.
    by_identity: dict[int, Any] = {}
    by_equality: set[Any] = set()
    for module_prefix, owner in _owners(module, prefix, recurse, remove_duplicate):
        dotted = _dot(module_prefix)
        for name, member in get_members_fn(owner):
            if member is None:
                continue
            if remove_duplicate:
                if isinstance(member, (torch.Tensor, torch.nn.Module)):
                    if id(member) in by_identity:
                        continue
                    by_identity[id(member)] = member
                elif member in by_equality:
                    continue
                else:
                    by_equality.add(member)
            yield dotted + name, member


def _pairs(table: str, module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    pairs: Iterable[tuple[str, Any]] = getattr(module, table).items()
    return pairs


def named_tensors(
    module: torch.nn.Module, table: str, prefix: str, recurse: bool, remove_duplicate: bool
) -> Generator[tuple[str, Any], None, None]:
    """Yield the pairs in the attribute ``table`` of ``module`` and, if asked, of all below it."""
    if not all_standard(module, _NAMED_MEMBERS):
        yield from module._named_members(
            functools.partial(_pairs, table),
            prefix=prefix,
            recurse=recurse,
            remove_duplicate=remove_duplicate,
        )
        return
    seen: dict[int, Any] = {}
    for module_prefix, owner in _owners(module, prefix, recurse, remove_duplicate):
        members = getattr(owner, table)
        if not members:
            continue
        dotted = module_prefix + "." if module_prefix else ""
        for name, member in members.items():
            if member is None:
                continue
            if remove_duplicate:
                key = id(member)
                if key in seen:
                    continue
                seen[key] = member
            yield dotted + name, member
