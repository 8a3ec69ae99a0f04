"""Iterating over the modules of a tree, which torch's walks of parameters and buffers call too.

``named_modules`` has a descent of its own beside that of ``_tree.py``: it is a generator, and the
loop around each optimizer step runs it, so a call for each module would show.
"""

from collections.abc import Generator
from typing import Final, cast

import torch

from modkit._tree import refuse_cycle
from modkit.nn._overrides import patchable, standard_classes


_NamedModulesClasses: Final = standard_classes("named_modules")


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
        """Return True if a module is met for the first time, and remember it."""
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
        """Return True if a module is new although the set holds an equal one or cannot hold it."""
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
        """Return the memo for an override; from then on the walk uses it too."""
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
