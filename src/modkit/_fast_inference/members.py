"""A module's ``__dict__`` inside the block: its members, and the function to call."""

import copy
from collections.abc import Callable
from typing import Any, Final, NoReturn

from torch import nn

from modkit.nn._overrides import class_is_standard, methods


# As in ``Module.__getattr__``: a parameter hides a buffer of its name, and that a module.
_TABLES: Final = ("_modules", "_buffers", "_parameters")
_ACCESS: Final = methods("__getattr__")
_REPLACED: Final = frozenset({*_TABLES, "__dict__"})
# Torch calls the function under this name instead of the hooks and ``forward``.
CALL_SLOT: Final = "_compiled_call_impl"
_OVERRIDES: Final = ("__getstate__", "__deepcopy__", "_replicate_for_data_parallel")


class Table(dict[str, Any]):
    """Replaces a table of members; forwards every change to it and to ``__dict__``.

    Attributes:
        binding: The entries of the block in the module, updated at each change.
        original: The table of the module outside of the block, which stays up to date.
        changed: True from the first change on; functions of containers then take torch's path.

    Args:
        binding: The entries of the block in the module.
        original: The table to replace.
    """

    __slots__ = ("binding", "changed", "original")

    def __init__(self, binding: "Binding", original: dict[str, Any]) -> None:
        super().__init__(original)
        self.binding: Binding = binding
        self.original: dict[str, Any] = original
        self.changed: bool = False

    def __contains__(self, name: object) -> bool:
        # ``Module.__setattr__`` asks this before it sets an attribute: here, to replace a whole
        # table, which nothing would follow from then on. The block gives this module up.
        if name in _REPLACED:
            self.binding.close()
        return super().__contains__(name)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc] # a Table is not returned
        # ``module._modules |= ...`` assigns the result, which must outlast the block.
        self.update(other)
        return self.original

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.original,)


def _followed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of dict that also brings the other two places up to date."""

    def change(self: Table, *args: Any, **kwargs: Any) -> Any:
        if not self.binding.is_open:
            # A caller that has kept this table changes the one that the module has.
            dict.clear(self)
            dict.update(self, self.original)
        try:
            return method(self, *args, **kwargs)
        finally:
            # After an error as well: ``update`` may have entered a part of its argument.
            self.changed = True
            self.original.clear()
            self.original.update(self)
            self.binding.mirror()

    return change


for _name in ("clear", "pop", "popitem", "setdefault", "update", "__setitem__", "__delitem__"):
    setattr(Table, _name, _followed(getattr(dict, _name)))


class Binding:
    """The entries of ``fast_inference`` in one module, and the number of blocks that use them.

    Attributes:
        module: The module.
        users: The number of blocks; the last one that is left removes the entries.
        is_open: Whether the module has the entries.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module = module
        self.users: int = 0
        self._state: dict[str, Any] = module.__dict__
        self._mirrored: dict[str, Any] = {}
        self._call: Callable[..., Any] | None = None
        self.is_open: bool = False

    def open(self) -> None:
        """Add the members to ``__dict__``, and methods that copy and pickle without them."""
        self.is_open = True
        if not class_is_standard(type(self.module), _ACCESS):
            return
        for key in _TABLES:
            table = self._state.get(key)
            # Without children, too: a parametrization adds one when it has given the module its
            # class.
            if type(table) is dict and (table or key == "_modules"):
                self._state[key] = Table(self, table)
        self.mirror()
        self._state["__getstate__"] = self.state_of_copies
        self._state["_replicate_for_data_parallel"] = self.refuse_to_replicate

    def mirror(self) -> None:
        """Update the members in ``__dict__`` from the tables."""
        if not self.is_open:
            return

        state = self._state
        cls = type(self.module)
        mirrored = self._mirrored
        # A parametrization, which may come inside the block, gives the module such a class.
        if hasattr(cls, "__deepcopy__"):
            state["__deepcopy__"] = self.deepcopy
        members: dict[str, Any] = {}
        for table in map(state.get, _TABLES):
            if type(table) is Table:
                members.update(table)

        # Entries that the user has written over are left alone; ``state`` is never a member.
        for name in [name for name in mirrored if name not in members]:
            value = mirrored.pop(name)
            if state.get(name, state) is value:
                del state[name]

        # A name that Python finds in the class, or as a plain attribute, hides a member outside,
        # too.
        for name, value in members.items():
            is_free = str(name).isidentifier() and name not in state and not hasattr(cls, name)
            if name in mirrored or is_free:
                state[name] = mirrored[name] = value

    def bind(self, call: Callable[..., Any] | None) -> None:
        """Set the function that torch calls instead of the hooks and ``forward``."""
        if call is not None and self.is_open:
            self._call = self._state[CALL_SLOT] = call

    def close(self) -> None:
        """Remove everything; changes by the user stay."""
        state = self._state
        self.is_open = False

        if self._call is not None and state.get(CALL_SLOT) is self._call:
            del state[CALL_SLOT]
        # Breaks a reference cycle through the tables.
        self._call = None

        while self._mirrored:
            name, value = self._mirrored.popitem()
            if state.get(name, state) is value:
                del state[name]

        for key in _TABLES:
            table = state.get(key)
            if type(table) is Table:
                state[key] = table.original
        for key in _OVERRIDES:
            if getattr(state.get(key), "__self__", None) is self:
                del state[key]

    def state_of_copies(self) -> Any:
        """Return the module's state outside the block, for copies and pickles."""
        state: Any = type(self.module).__getstate__(self.module)
        if not isinstance(state, dict):
            return state
        ours = self._entries()
        return {
            key: value.original if type(value) is Table else value
            for key, value in state.items()
            if not (key in ours and value is ours[key])
        }

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        """Copy the module without the block's entries.

        The ``__deepcopy__`` of parametrized classes copies ``__dict__`` as it is.
        """
        ours = self._entries()
        for key in ours:
            del self._state[key]
        try:
            return copy.deepcopy(self.module, memo)
        finally:
            self._state.update(ours)

    def _entries(self) -> dict[str, Any]:
        """Return the block's entries in ``__dict__``, except tables."""
        ours = {**self._mirrored, CALL_SLOT: self._call}
        return {
            key: value
            for key, value in self._state.items()
            if (key in ours and value is ours[key])
            or (key in _OVERRIDES and getattr(value, "__self__", None) is self)
        }

    def refuse_to_replicate(self) -> NoReturn:
        """Raise, since replicas copy ``__dict__`` with the members of this module."""
        name = type(self.module).__name__
        raise RuntimeError(
            f"DataParallel cannot replicate {name} inside fast_inference(): the replicas would use "
            "the weights of the original. Use fast_inference() for a model on one device."
        )
