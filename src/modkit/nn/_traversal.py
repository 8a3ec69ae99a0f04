"""Iterating over the modules, parameters and buffers of a tree.

``named_modules`` and ``_standard_modules`` have a descent of their own beside that of ``_tree.py``: they
are generators, and the loop around each optimizer step runs them, so a call for each module would show.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import dropwhile
from operator import length_hint, not_
from typing import Any, Final, cast

import torch
from torch.nn import Parameter

from modkit._tree import refuse_cycle
from modkit._upstream import original_methods
from modkit.nn._overrides import all_standard, methods, patchable, standard_classes


_NAMED_MODULES: Final = methods("named_modules")
_NamedModulesClasses: Final = standard_classes("named_modules")
_NAMED_PARAMETERS: Final = methods("named_parameters", "_named_members")


class _Memo(set[torch.nn.Module]):
    """A set of modules for overrides of ``named_modules`` to pass on, with what it cannot hold."""

    unlike: dict[int, torch.nn.Module]


class _Seen:
    """The modules that a walk has met, told apart by identity.

    A set compares by the classes' equality, which is fast, as most leave it alone. ``unlike`` holds
    the others, by identity: modules that cannot be hashed, such as dataclasses, or that equal another
    one. A memo of the caller's is compared as the caller does it, if possible.
    """

    __slots__ = ("_by_identity", "_remember", "met", "unlike")

    def __init__(self, memo: set[torch.nn.Module] | None, *, remember: bool) -> None:
        self.met: set[torch.nn.Module] = set() if memo is None else memo
        self.unlike = memo.unlike if isinstance(memo, _Memo) else {}
        self._by_identity = memo is None or isinstance(memo, _Memo)
        self._remember = remember

    def is_new(self, module: torch.nn.Module) -> bool:
        """Return True if ``module`` is met for the first time, and remember it."""
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
        """Return True if a module is new although the set holds an equal one or cannot hold it."""
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


def _dot(path: str) -> str:
    return path + "." if path else ""


@patchable
def named_modules(
    self: torch.nn.Module,
    memo: set[torch.nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Generator[tuple[str, torch.nn.Module], None, None]:
    """Yield ``(dotted name, module)`` for this module and all below it, parents first.

    Modules in ``memo`` are left out, and those that were yielded are added to it.

    modkit: Without a ``memo``, modules are compared by identity, not by ``==``: equal ones are all
    yielded, and they need not be hashable. With ``remove_duplicate=False``, a module that contains
    itself raises a RecursionError that names it.
    """
    if memo is None:
        yield prefix, self
        if not self._modules:
            return
    seen = _Seen(memo, remember=remove_duplicate)
    new = seen.is_new(self)
    if memo is not None:
        if not new:
            return
        yield prefix, self
    met = seen.met
    note = met.add
    standard = _NamedModulesClasses()
    stack = [(_dot(prefix), self, iter(self._modules.items()))]
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
                # Nothing else ends a walk of a module that contains itself.
                if any(child is parent for _, parent, _ in stack):
                    refuse_cycle(child)
            elif not known:
                note(child)
            yield path, child
            below = child._modules
            if below:
                stack.append((_dot(path), child, iter(below.items())))
                break
        else:
            stack.pop()


@patchable
def modules(self: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
    """Yield this module and all below it, parents first, by default each once.

    modkit: Modules are compared by identity, not by ``==``: equal ones are all yielded, and they need
    not be hashable. With ``remove_duplicate=False``, a module that contains itself raises a
    RecursionError that names it.
    """
    if not remove_duplicate:
        for _, found in self.named_modules(remove_duplicate=False):
            yield found
    elif all_standard(self, _NAMED_MODULES):
        yield from _standard_modules(self)
    else:
        # Torch's arguments to an override depend on its release.
        yield from original_methods["modules"](self)


def _name_at(parent: torch.nn.Module, children: object, below: torch.nn.Module) -> str:
    """Return the name of the child ``below``, which the iterator ``children`` has just returned."""
    names, left = [*parent._modules], length_hint(children, -1)
    # A dict that has changed, and one of another class, give no such hint.
    name = names[-1 - left] if 0 <= left < len(names) else ""
    return next((each for each in (name, *names) if parent._modules.get(each) is below), name)


def _standard_modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``module``, which does not override ``named_modules``, and all below it, each once."""
    yield module
    if not module._modules:
        return
    seen = _Seen(None, remember=True)
    seen.is_new(module)
    met = seen.met
    note = met.add
    standard = _NamedModulesClasses()
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
                names = map(_name_at, parents, stack, [*parents[1:], child])
                path = ".".join(dropwhile(not_, names))
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


@patchable
def parameters(self: torch.nn.Module, recurse: bool = True) -> Iterator[Parameter]:
    """Yield the parameters, each once; of all modules below too if ``recurse``.

    modkit: Modules are compared by identity, not by ``==``: equal ones are all searched, and they need
    not be hashable.
    """
    if not all_standard(self, _NAMED_PARAMETERS) or (
        recurse and not all_standard(self, _NAMED_MODULES)
    ):
        for _, found in self.named_parameters(recurse=recurse):
            yield found
        return
    # By identity, as tensors compare in a set, but without the hash that tensors define in Python.
    # The values keep what was seen alive, so that no identity is used twice.
    seen: dict[int, Parameter] = {}
    for owner in _standard_modules(self) if recurse else (self,):
        for parameter in owner._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen[id(parameter)] = parameter
                yield parameter


@patchable
def _named_members(
    self: torch.nn.Module,
    get_members_fn: Callable[[torch.nn.Module], Iterable[tuple[str, Any]]],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Yield the members that a function finds in this module and, if ``recurse``, in all below it.

    ``named_parameters`` and ``named_buffers``, which are torch's own, call this.
    """
    seen: dict[int, Any] = {}
    owners: Any = [(prefix, self)]
    if recurse:
        owners = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
    for module_prefix, owner in owners:
        for name, member in get_members_fn(owner):
            if member is None:
                continue
            key = id(member)
            if key in seen:
                continue
            if remove_duplicate:
                seen[key] = member
            yield f"{module_prefix}.{name}" if module_prefix else name, member
