"""Limits on what a pickle may make its readers do: hashing, nesting, memory.

:class:`BoundedUnpickler` runs the instructions of torch's readers, and raises an error at the first
one that exceeds a limit. The limits, each with the attack that it stops:

- objects that are visited for hashes: tuples within tuples, which double the time with each level;
- memory of containers, linear in the size of the pickle: a file of 5 MB that takes 700 MB;
- places of the memo: one number that makes a reader in C++ allocate all places below it;
- attributes: a state that changes the functions and classes that all files share;
- levels of nesting: a stack overflow in the reader or in the destructor of what it has made.
"""

import argparse
import gc
import io
import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Sized
from contextlib import contextmanager
from typing import Any, Final, cast


DEEPEST: Final = 1000

# Bytes that readers allocate at an instruction. torch.save memoizes each container, which takes 5
# bytes besides those of its own instruction and of its content. So the most that its pickles need
# is 27 for a byte, for dicts of one entry: 80 + 168 for ``}r....\x88Ns``. Below that, real
# checkpoints are refused.
_COSTS: Final = {
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT"), 80),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 112),
    **dict.fromkeys(("SETITEM", "SETITEMS"), 168),
    **dict.fromkeys(("APPEND", "APPENDS", "REDUCE", "NEWOBJ"), 32),
    **dict.fromkeys(("EMPTY_SET", "BINPERSID"), 256),
    "MARK": 64,
}
# Instructions of protocol 4, in which the metadata of distributed checkpoints are written.
_LATER: Final = ("FRAME", "MEMOIZE", "SHORT_BINUNICODE", "STACK_GLOBAL")
# Other instructions of torch's readers, which read protocol 2 alone.
_FREE: Final = (
    *("EMPTY_TUPLE", "BUILD", "GLOBAL", "NONE", "NEWTRUE", "NEWFALSE", "PROTO", "STOP"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE", "SHORT_BINSTRING"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)
_CODES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
# The cost of a call besides that of its instruction; a tensor is the largest thing that one makes.
_CONTAINER_COSTS: Final[dict[type, int]] = {OrderedDict: 128, Counter: 224, set: 224}
OTHER_CALL: Final = 320
_ITEM_COST: Final = 100
_POINTER: Final = 8
CLASS_COST: Final = 1500
_FREE_MEMORY: Final = 16 << 20
_MEMORY_PER_BYTE: Final = 28
_MEMORY_PER_MEMBER: Final = 2048


def most_memory(size: int, members: int) -> int:
    """Return how much memory a pickle of a size may take; each member may be a tensor."""
    return _FREE_MEMORY + _MEMORY_PER_BYTE * size + _MEMORY_PER_MEMBER * members


def memory_bound(data: bytes) -> int:
    """Return at least the memory of the containers in a pickle, without parsing its strings."""
    calls = data.count(pickle.REDUCE) * OTHER_CALL
    costs = (data.count(getattr(pickle, name)) * cost for name, cost in _COSTS.items())
    return calls + sum(costs)


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the garbage collector, which would traverse thousands of new objects for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class BoundedUnpickler(pickle._Unpickler):
    """The unpickler of the standard library that is written in Python, with limits.

    Args:
        data: The pickle.
        members: The number of members of its archive.
    """

    # Whether it has instructions that torch.load refuses.
    has_later = False

    def __init__(self, data: bytes, members: int = 0) -> None:
        # The strings of Python 2 may be in any encoding.
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="replace")
        self._most_places = len(data)
        self._hashes = 10_000 + 10 * len(data)
        self.memory: int = most_memory(len(data), members)
        # The standard unpickler looks each instruction up in this attribute.
        cast("Any", self).dispatch = _Instructions(self)

    def load(self) -> Any:
        """Return the object; the memo is compared with the size of the pickle at the end."""
        content: Any = super().load()
        memo: dict[int, object] = cast("Any", self).memo
        if (place := max(memo, default=0)) > self._most_places:
            raise pickle.UnpicklingError(f"it stores an object at place {place}")
        return content

    def spend(self, memory: int) -> None:
        """Take from the memory that is left."""
        self.memory -= memory
        if self.memory < 0:
            raise pickle.UnpicklingError(
                f"it makes more objects than its size explains: {self._most_places:,} bytes would "
                "take many times their memory"
            )

    def hash(self, keys: Iterable[object]) -> None:
        """Count the objects that are visited when keys are hashed, before they are."""
        nested: list[Any] = [key for key in keys if type(key) in {tuple, list}]
        for _ in range(DEEPEST):
            if not nested:
                return
            self._hashes -= sum(map(len, nested))
            if self._hashes < 0:
                raise pickle.UnpicklingError("it holds tuples that take too long to hash")
            nested = [item for key in nested for item in key if type(item) in {tuple, list}]
        raise pickle.UnpicklingError(f"it nests deeper than {DEEPEST:,} levels")


class _Instructions:
    """The functions that run the instructions, each paid for when it is looked up."""

    def __init__(self, unpickler: BoundedUnpickler) -> None:
        self._unpickler = unpickler

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        if code not in _RUN:
            raise pickle.UnpicklingError(f"it has {_CODES.get(code, hex(code))}, which is not read")
        run, cost = _RUN[code]
        self._unpickler.has_later |= _CODES[code] in _LATER
        if cost:
            self._unpickler.spend(cost)
        return run


_STOCK: Final = {_CODES[code]: run for code, run in pickle._Unpickler.dispatch.items()}


def _set_item(unpickler: Any) -> None:
    unpickler.hash(unpickler.stack[-2:-1])
    _STOCK["SETITEM"](unpickler)


def _set_items(unpickler: Any) -> None:
    items: list[Any] = unpickler.pop_mark()
    unpickler.hash(items[::2])
    # Looked up for a batch of none too, as torch refuses all but dicts.
    set_item = unpickler.stack[-1].__setitem__
    for key, value in zip(items[::2], items[1::2], strict=True):
        set_item(key, value)


def _call(unpickler: Any) -> None:
    function, arguments = unpickler.stack[-2:]
    first = arguments[0] if arguments else None
    length = len(first) if isinstance(first, Sized) else 0
    if isinstance(function, type) and function in _CONTAINER_COSTS:
        # It hashes what is in its argument: items, or pairs of a key and a value.
        unpickler.hash(arguments)
        unpickler.spend(_CONTAINER_COSTS[function] + _ITEM_COST * length)
    else:
        # A few bytes could encode one long string, or copy one long tuple, each time.
        unpickler.spend(OTHER_CALL + length + _POINTER * len(arguments))
    _STOCK["REDUCE"](unpickler)


def _new_object(unpickler: Any) -> None:
    unpickler.spend(_POINTER * len(unpickler.stack[-1]))
    _STOCK["NEWOBJ"](unpickler)


def _set_state(unpickler: Any) -> None:
    state = unpickler.stack.pop()
    target = unpickler.stack[-1]
    if type(target) not in {OrderedDict, argparse.Namespace}:
        target.set_state(state)
        return
    # One long state could be set by a few bytes each time.
    unpickler.hash([list(state)])
    vars(target).update(dict.items(state))


_OWN: Final = {
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "REDUCE": _call,
    "NEWOBJ": _new_object,
    "BUILD": _set_state,
}
_RUN: Final = {
    code: (_OWN.get(name, _STOCK[name]), _COSTS.get(name, 0))
    for code, name in _CODES.items()
    if name in {*_COSTS, *_FREE, *_LATER}
}


_LEAVES: Final = {str, int, float, bool, type(None), bytes}


def check_depth(content: object, items_of: Callable[[Any], Iterable[object] | None]) -> None:
    """Raise an error if objects are nested too deeply.

    Args:
        content: The outermost object.
        items_of: Returns what an object holds, or None.
    """
    # Levels below each object; while these are counted, as for one that contains itself, 0.
    depths: dict[int, int] = {}
    waiting = [(content, False)]
    while waiting:
        entry, is_counted = waiting.pop()
        items = items_of(entry)
        if items is None or (id(entry) in depths and not is_counted):
            continue
        if is_counted:
            depth = 1 + max((depths.get(id(item), 0) for item in items), default=-1)
            if depth > DEEPEST:
                raise pickle.UnpicklingError(f"it nests deeper than {DEEPEST:,} levels")
            depths[id(entry)] = depth
        else:
            depths[id(entry)] = 0
            waiting.append((entry, True))
            waiting += [(item, False) for item in items if type(item) not in _LEAVES]
