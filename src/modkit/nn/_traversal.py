"""Iterating over the modules, parameters and buffers of a tree.

``named_modules`` and ``_standard_modules`` have a descent of their own beside that of ``_tree.py``:
they are generators, and the loop around each optimizer step runs them, so a call for each module
would show.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import itemgetter, length_hint
from typing import Any, Final, cast

import torch
from torch.nn import Parameter

from modkit._tree import refuse_cycle
from modkit._upstream import original_methods
from modkit.nn._overrides import all_standard, methods, patchable, standard_classes


_VALUE: Final = itemgetter(1)
_NAMED_MODULES: Final = methods("named_modules")
_NamedModulesClasses: Final = standard_classes("named_modules")
_NAMED_PARAMETERS: Final = methods("named_parameters", "_named_members")


class _Memo(set[torch.nn.Module]):
    """A set of modules for overrides of ``named_modules`` to pass on, with what it cannot hold."""

    unlike: dict[int, torch.nn.Module]


class _Seen:
    """The modules that a walk has met, told apart by identity.

    A set compares by the classes' equality, which is fast, as most leave it alone. ``unlike`` holds
    the others, by identity: modules that cannot be hashed, such as dataclasses, or that equal
    another one. A memo of the caller's is compared as the caller does it, if possible.
    """

    __slots__ = ("_by_identity", "_remember", "met", "unlike")

    def __init__(self, memo: set[torch.nn.Module] | None, *, remember: bool) -> None:
        self.met: set[torch.nn.Module] = set() if memo is None else memo
        self.unlike = memo.unlike if isinstance(memo, _Memo) else {}
        self._by_identity = memo is None or isinstance(memo, _Memo)
        self._remember = remember

    def is_new(self, module: torch.nn.Module) -> bool:
        """Return True if a module is met for the first time, and remember it.

        Args:
            module: A module of the walk.

        Returns:
            False if the walk has met it, or if it is in the memo.

        Raises:
            TypeError: If it cannot be hashed, and the caller's memo compares by hash.
        """
        try:
            is_in_set = module in self.met
        except TypeError:
            if not self._by_identity and type(module).__hash__ is not cast("object", None):
                raise
            is_in_set = True

        if is_in_set:
            return self.is_another(module)
        if self._remember:
            self.met.add(module)
        return True

    def is_another(self, module: torch.nn.Module) -> bool:
        """Return True if a module is new although the set holds an equal one or cannot hold it.

        Args:
            module: A module that the set holds, or that cannot be hashed.

        Returns:
            False if the walk has met this very module.
        """
        hashing = cast("object", type(module).__hash__)
        if hashing is object.__hash__ or id(module) in self.unlike:
            return False
        if hashing is not None and (
            not self._by_identity or any(module is met for met in self.met)
        ):
            return False
        if self._remember:
            self.unlike[id(module)] = module
        return True

    def share(self) -> set[torch.nn.Module]:
        """Return the memo for an override; from then on the walk uses it too.

        Returns:
            The caller's memo, or a set that also carries what it cannot hold.
        """
        if self._by_identity and not isinstance(self.met, _Memo):
            memo = _Memo(self.met)
            memo.unlike = self.unlike
            self.met = memo
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

    Args:
        self: The module.
        memo: Modules to leave out; those that were yielded are added to it.
        prefix: Put before each name, with a dot.
        remove_duplicate: Yield each module once, under its first name.

    Yields:
        The name and the module. The name of this one is ``prefix``.

    Raises:
        RecursionError: If a module contains itself, and ``remove_duplicate`` is False.

    modkit: Without a ``memo``, modules are compared by identity, not by ``==``: equal ones are all
    yielded, and they need not be hashable. With ``remove_duplicate=False``, a module that contains
    itself raises a RecursionError that names it.
    """
    if memo is None:
        yield prefix, self
        if not self._modules:
            return

    seen = _Seen(memo, remember=remove_duplicate)
    is_new = seen.is_new(self)
    if memo is not None:
        if not is_new:
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
                is_in_set = child in met
            except TypeError:
                is_in_set = True
            if is_in_set and not seen.is_another(child):
                continue
            if not remove_duplicate:
                # Nothing else ends a walk of a module that contains itself.
                if any(child is parent for _, parent, _ in stack):
                    refuse_cycle(child)
            elif not is_in_set:
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

    Args:
        self: The module.
        remove_duplicate: Yield each module once.

    Yields:
        The modules.

    Raises:
        RecursionError: If a module contains itself, and ``remove_duplicate`` is False.

    modkit: Modules are compared by identity, not by ``==``: equal ones are all yielded, and they
    need not be hashable. With ``remove_duplicate=False``, a module that contains itself raises a
    RecursionError that names it.
    """
    if not remove_duplicate:
        for _, module in self.named_modules(remove_duplicate=False):
            yield module
    elif all_standard(self, _NAMED_MODULES):
        yield from _standard_modules(self)
    else:
        # Torch's arguments to an override depend on its release.
        yield from original_methods["modules"](self)


def _values(table: Any) -> Iterator[Any]:
    """Return an iterator over the values of a table, as torch reads them: by ``items()``.

    A user may have replaced the table by one of a class that overrides it.
    """
    return iter(table.values()) if type(table) is dict else map(_VALUE, table.items())


class _Children:
    """An iterator over the children in a table of another class than dict, as :func:`_values`.

    ``name`` is that of the latest child. Deleting a layer of a Sequential leaves such a table.
    """

    def __init__(self, table: Any) -> None:
        self._items = iter(table.items())
        self.name = ""

    def __iter__(self) -> "_Children":
        return self

    def __next__(self) -> Any:
        self.name, child = next(self._items)
        return child


def _children_of(table: Any) -> Iterator[torch.nn.Module | None]:
    """Return an iterator over the values of a table of children, from which names can be told."""
    return iter(table.values()) if type(table) is dict else _Children(table)


def _name_at(parent: torch.nn.Module, children: object, below: torch.nn.Module) -> str:
    """Return the name of the child ``below``, which the iterator ``children`` has just returned.

    A child may have several names, so the position of the iterator decides, if it is known.
    """
    if isinstance(children, _Children):
        return children.name
    names = [*parent._modules]
    left = length_hint(children, -1)
    # A dict that has changed gives no such hint.
    name = names[-1 - left] if 0 <= left < len(names) else ""
    for candidate in (name, *names):
        if parent._modules.get(candidate) is below:
            return candidate
    return name


def _path_to(
    child: torch.nn.Module,
    parents: Sequence[torch.nn.Module],
    iterators: Sequence[Iterator[torch.nn.Module | None]],
) -> str:
    """Return the dotted name of a child, given its parents from the root on and their iterators.

    Names are found when an override needs one, since most walks of ``modules()`` need none.
    """
    below = [*parents[1:], child]
    names = [
        _name_at(parent, iterator, module)
        for parent, iterator, module in zip(parents, iterators, below, strict=True)
    ]
    # An empty name at the root has no dot, as in ``_dot``.
    while names and not names[0]:
        del names[0]
    return ".".join(names)


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
    stack = [_children_of(module._modules)]
    while stack:
        for child in stack[-1]:
            if child is None:
                continue

            # As in ``named_modules``.
            if not standard[type(child)] or "named_modules" in child.__dict__:
                met = seen.share()
                note = met.add
                path = _path_to(child, parents, stack)
                for _, module_below in child.named_modules(met, path, True):
                    yield module_below
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
                # ``_children_of`` written out for most.
                stack.append(iter(below.values()) if type(below) is dict else _Children(below))
                break
        else:
            stack.pop()
            parents.pop()


@patchable
def parameters(self: torch.nn.Module, recurse: bool = True) -> Iterator[Parameter]:
    """Yield the parameters, each once; of all modules below too if ``recurse``.

    Args:
        self: The module.
        recurse: Whether to yield those of modules below.

    Yields:
        The parameters.

    modkit: Modules are compared by identity, not by ``==``: equal ones are all searched, and they
    need not be hashable.
    """
    if not all_standard(self, _NAMED_PARAMETERS) or (
        recurse and not all_standard(self, _NAMED_MODULES)
    ):
        for _, found_by_override in self.named_parameters(recurse=recurse):
            yield found_by_override
        return

    # By identity, as tensors compare in a set, but without the hash that tensors define in Python.
    # The values keep what was seen alive, so that no identity is used twice.
    seen: dict[int, Parameter] = {}
    for owner in _standard_modules(self) if recurse else (self,):
        for parameter in _values(owner._parameters):
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

    Args:
        self: The module.
        get_members_fn: Returns the names and members of one module; members that are None are left
            out.
        prefix: Put before each name, with a dot.
        recurse: Whether to look at modules below.
        remove_duplicate: Yield each member once, under its first name.

    Yields:
        The dotted name and the member.
    """
    seen: dict[int, Any] = {}
    owners: Any = [(prefix, self)]
    if recurse:
        owners = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)

    for module_prefix, owner in owners:
        for name, member in get_members_fn(owner):
            if member is None:
                continue
            # By identity, as in ``parameters``.
            key = id(member)
            if key in seen:
                continue
            if remove_duplicate:
                seen[key] = member
            yield f"{module_prefix}.{name}" if module_prefix else name, member
