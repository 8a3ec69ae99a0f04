"""Pickles as data: what they would build, with nothing imported and nothing called.

A pickle is a program for a small machine with a stack. This one knows the instructions that torch
writes, and where Python would import a name or call it, it notes what would have been called.
"""

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from modkit.errors import FileError


# A pickle of three hundred thousand tensors has fewer. The limit keeps a crafted one from filling the
# memory.
MOST_INSTRUCTIONS: Final = 20_000_000


@dataclass(frozen=True)
class Name:
    """A name that Python would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Call:
    """What a call would have made: ``function`` is mostly a :class:`Name`.

    Args:
        function: What would have been called.
        arguments: What it would have been called with.
        state: What the result would have been given with ``__setstate__`` or as its attributes.
        items: What would have been appended or set.
    """

    function: Any
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Reference:
    """Something that the pickle leaves to the file around it: a storage, mostly."""

    key: Any


class _Mark:
    """Where on the stack a collection begins."""


_MARK: Final = _Mark()


class _Machine:
    """The stack, the memo and the instructions."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[Name, None] = {}

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def since_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("a mark is missing")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def top(self) -> Any:
        if self.stack[-1] is _MARK:
            raise ValueError("a value is missing")
        return self.stack[-1]

    def name(self, module: object, name: object) -> Name:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name is not text")  # noqa: TRY004 - the file is wrong, not the caller
        found = Name(module, name)
        self.names[found] = None
        return found

    def remember(self, key: int) -> None:
        self.memo[key] = self.top()

    def append(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, Call):
            target.items.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            _check_keys(items)
            target.update(items)
        else:
            raise ValueError(f"items are appended to {type(target).__name__}")  # noqa: TRY004

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Call):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            _check_keys(items[::2])
            target.update(pairs)
        else:
            raise ValueError(f"items are set in {type(target).__name__}")  # noqa: TRY004

    def call(self) -> None:
        arguments = self.pop()
        self.stack.append(Call(self.pop(), arguments))

    def call_with_keywords(self) -> None:
        keywords, arguments = self.pop(), self.pop()
        self.stack.append(Call(self.pop(), (arguments, keywords)))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, Call):
            raise ValueError(f"a state is given to {type(target).__name__}")  # noqa: TRY004
        target.state = state


_Act = Callable[[_Machine, Any], Any]


def _check_keys(keys: list[Any]) -> None:
    # The hash of a tuple of tuples takes time that doubles with each level that shares its parts.
    for key in keys:
        if isinstance(key, (tuple, frozenset)) and any(
            isinstance(part, (tuple, frozenset)) for part in key
        ):
            raise ValueError("a key is nested")


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    _check_keys(items[::2])
    return dict(zip(items[::2], items[1::2], strict=True))


def _frozen(items: list[Any]) -> frozenset[Any]:
    _check_keys(items)
    return frozenset(items)


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(value: Any) -> _Act:
    return lambda machine, _: machine.stack.append(value)


def _tuple_of(count: int) -> _Act:
    def act(machine: _Machine, _: Any) -> None:
        items = tuple(machine.pop() for _ in range(count))
        machine.stack.append(items[::-1])

    return act


def _import_name(machine: _Machine, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(machine.name(module, name))


def _import_from_stack(machine: _Machine, _: Any) -> None:
    name = machine.pop()
    machine.stack.append(machine.name(machine.pop(), name))


_PUSHES: Final = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
_ACTS: Final[dict[str, _Act]] = {
    **dict.fromkeys(_PUSHES.split(), _push),
    **dict.fromkeys(("PROTO", "FRAME"), lambda _, __: None),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "MARK": _constant(_MARK),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.stack.append(set()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "LIST": lambda machine, _: machine.stack.append(machine.since_mark()),
    "DICT": lambda machine, _: machine.stack.append(_dict_of(machine.since_mark())),
    "FROZENSET": lambda machine, _: machine.stack.append(_frozen(machine.since_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "DUP": lambda machine, _: machine.stack.append(machine.top()),
    "GLOBAL": _import_name,
    "STACK_GLOBAL": _import_from_stack,
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.call(),
    "NEWOBJ_EX": lambda machine, _: machine.call_with_keywords(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.stack.append(Reference(machine.pop())),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
}
for _name in ("PUT", "BINPUT", "LONG_BINPUT"):
    _ACTS[_name] = _Machine.remember
for _name in ("GET", "BINGET", "LONG_BINGET"):
    _ACTS[_name] = lambda machine, key: machine.stack.append(machine.memo[key])


def read_pickle(file: IO[bytes], what: str) -> tuple[Any, tuple[Name, ...]]:
    """Return what the next pickle in a file holds, and the names that it would import.

    Args:
        file: A file in memory, at the start of a pickle; afterwards it stands behind it.
        what: How the pickle is called in errors.

    Raises:
        FileError: The pickle is damaged, or has instructions that torch does not write.
    """
    machine = _Machine()
    count = 0
    try:
        for instruction, argument, _ in pickletools.genops(file):
            count += 1
            if count > MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {MOST_INSTRUCTIONS:,} instructions")  # noqa: TRY301
            if instruction.name == "STOP":
                return machine.pop(), tuple(machine.names)
            act = _ACTS.get(instruction.name)
            if act is None:
                raise ValueError(f"torch does not write {instruction.name}")  # noqa: TRY301
            act(machine, argument)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise FileError(f"{what} is damaged: {error}") from error
    raise FileError(f"{what} is damaged: it does not end")


def entries_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the members of a value by their keys: those of a dict, a list, or an object."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, Call):
        yield from _entries_of_call(value)


def _entries_of_call(call: Call) -> Iterator[tuple[Any, Any]]:
    # An ordered dict has its entries as pairs; other objects have their state, or arguments.
    if all(isinstance(item, tuple) and len(item) == 2 for item in call.items):
        yield from call.items
    else:
        yield from enumerate(call.items)
    yield from entries_of(call.state)
    if call.state is None:
        yield from entries_of(call.arguments)
