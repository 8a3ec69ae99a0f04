"""What a pickle would make a reader do: how deep it nests, what it hashes, how much memory it asks for.

torch's readers of pickles execute no code, but trust the rest. In C++, deep nesting overflows the stack and a
storage is as large as the pickle says, whatever the file has. In Python, tuples that hold one another are hashed
in exponential time. This follows the instructions without making the objects.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from modkit.files.zip_archive import Member


DEEPEST: Final = 1000
_MOST_MEMORY: Final = 1 << 24  # bytes that a call may ask for by a number
# Bytes of an element, for storages whose names are not those of dtypes.
_WIDTHS: Final = {
    "Byte": 1,
    "Char": 1,
    "Untyped": 1,
    "ComplexHalf": 4,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}
_MARK: Final = object()


class _Value:
    """An object: how deep it nests, how many objects its hash visits, what it is."""

    __slots__ = ("content", "depth", "held", "weight")

    def __init__(self, content: Any = None, depth: int = 0, weight: int = 1) -> None:
        self.content, self.depth, self.weight, self.held = content, depth, weight, False


class _Limits:
    """Follows the instructions of one pickle, and raises ValueError where they exceed a limit."""

    def __init__(
        self,
        data: bytes,
        members: Mapping[str, Member],
        folder: str,
        *,
        script: bool = False,
        start: int = 0,
    ) -> None:
        self._data, self._members, self._folder = data, members, folder
        self._script, self._at = script, start
        self._stack: list[Any] = []
        self._memo: dict[int, _Value] = {}
        self._storages: set[str] = set()
        self._work = 10_000 + 10 * len(data)

    def follow(self) -> int:
        """Follow all instructions, to the end or to one that torch does not have; return its place."""
        handlers = _HANDLERS
        while (code := self._bytes(1)[0]) != 0x2E:
            handler = handlers.get(code)
            if handler is None:
                if self._script:
                    raise ValueError(f"it has the instruction {code:#x}, which torch never writes")
                break
            handler(self)
        return self._at

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError("it is cut off")
        return self._data[start : self._at]

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return number

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._bytes(end + 1 - self._at)[:-1].decode()

    def _push(self, content: Any = None) -> None:
        self._stack.append(_Value(content))

    def _pop(self) -> _Value:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError
        found: _Value = value
        return found

    def _marked(self) -> list[_Value]:
        """Take everything above the last mark from the stack."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        found: list[_Value] = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _put(self, place: int) -> None:
        # torch's reader in C++ makes room for all places below.
        if place > len(self._data):
            raise ValueError(f"it stores an object at place {place}")
        self._memo[place] = self._stack[-1]

    def _tuple(self, count: int | None = None) -> None:
        items = self._marked() if count is None else [self._pop() for _ in range(count)][::-1]
        found = _Value(items, 0, 1 + sum(item.weight for item in items))
        self._stack.append(found)
        self._hold(found, items)

    def _hold(self, target: _Value, items: list[_Value]) -> None:
        depth = max(target.depth, 1 + max((item.depth for item in items), default=0))
        if depth > DEEPEST:
            raise ValueError(f"it nests deeper than {DEEPEST:,} levels")
        if depth > target.depth and target.held and self._script:
            # The depth of what holds it would no longer be right. No pickler of torch writes this.
            raise ValueError("it fills an object that is part of another one already")
        target.depth = depth
        for item in items:
            item.held = True

    def _fill(self, items: list[_Value]) -> None:
        target = self._stack[-1]
        if isinstance(target.content, list):
            target.content += items
        self._hold(target, items)

    def _set_items(self, items: list[_Value]) -> None:
        for key in items[::2]:
            self._hash(key)
        self._fill(items)

    def _hash(self, value: _Value, levels: int = 0) -> None:
        """Count the work of hashing an object, and of some levels of what it holds."""
        self._work -= value.weight
        if self._work < 0:
            raise ValueError("it holds tuples within tuples that take too long to hash")
        if levels and isinstance(value.content, list):
            for item in value.content:
                self._hash(item, levels - 1)

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        name = function.content if isinstance(function.content, str) else ""
        self._stack.append(_Value())
        self._hold(self._stack[-1], [arguments])
        given = arguments.content if isinstance(arguments.content, list) else []
        if name.endswith((".OrderedDict", ".Counter", ".set", ".dict", ".frozenset")):
            self._hash(arguments, 3)
        elif name == "_codecs.encode":
            # Some encodings take quadratic time; pickle knows this one only.
            if len(given) != 2 or given[1].content not in {b"latin1", b"latin-1"}:
                raise ValueError("it encodes a text in another way than pickle does")
        elif name.endswith(("bytearray", "Tensor", "Storage")):
            numbers = [item.content for item in given if isinstance(item.content, int)]
            if any(abs(number) > _MOST_MEMORY for number in numbers):
                raise ValueError(f"it calls {name} with {max(numbers)}, for memory alone")

    def _storage(self) -> None:
        value = self._pop()
        self._push()
        given = value.content
        if not isinstance(given, list) or len(given) != 5:
            self._hash(value, 2)
            return
        _, kind, key, location, numel = (item.content for item in given)
        if not isinstance(key, (bytes, int)) or given[3].weight > 1 or isinstance(location, list):
            raise ValueError("it names a storage by something else than a text")
        name = key.decode() if isinstance(key, bytes) else str(key)
        member = self._members.get(self._folder + name)
        width = _width(str(kind).rpartition(".")[2])
        if not isinstance(numel, int) or width is None or "\0" in name:
            raise ValueError(f"it names the storage {name!r} in another way than torch does")
        # torch.load makes a storage once, whatever the pickle says of it later.
        if name in self._storages and numel * width and not self._script:
            return
        self._storages.add(name)
        if member is not None and numel * width != member.size:
            raise ValueError(f"{member.name!r} has {member.size} bytes, not {numel * width}")


def _width(kind: str) -> int | None:
    """Return the bytes of an element of a kind of storage: FloatStorage, or UInt16Storage in scripts."""
    name = kind.removesuffix("Storage")
    dtype = getattr(torch, name.lower(), None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _WIDTHS.get(name)


def _global(limits: _Limits) -> None:
    module = limits._line()
    limits._push(f"{module}.{limits._line()}")


def _text(limits: _Limits) -> None:
    limits._push(limits._bytes(limits._number("<I")))


def _short_text(limits: _Limits) -> None:
    limits._push(limits._bytes(limits._bytes(1)[0]))


def _long(limits: _Limits) -> None:
    limits._push(int.from_bytes(limits._bytes(limits._bytes(1)[0]), "little", signed=True))


_Handler = Callable[[_Limits], object]
_HANDLERS: Final[dict[int, _Handler]] = {
    0x80: lambda limits: limits._bytes(1),
    ord("("): lambda limits: limits._stack.append(_MARK),
    ord("0"): lambda limits: limits._stack.pop(),
    ord("2"): lambda limits: limits._stack.append(limits._stack[-1]),
    ord("N"): lambda limits: limits._push(),
    0x88: lambda limits: limits._push(),
    0x89: lambda limits: limits._push(),
    ord("K"): lambda limits: limits._push(limits._bytes(1)[0]),
    ord("M"): lambda limits: limits._push(limits._number("<H")),
    ord("J"): lambda limits: limits._push(limits._number("<i")),
    ord("G"): lambda limits: limits._push(limits._bytes(8) and None),
    0x8A: _long,
    ord("X"): _text,
    ord("U"): _short_text,
    ord("c"): _global,
    ord(")"): lambda limits: limits._push([]),
    ord("]"): lambda limits: limits._push([]),
    ord("}"): lambda limits: limits._push({}),
    0x8F: lambda limits: limits._push({}),
    ord("t"): lambda limits: limits._tuple(),
    0x85: lambda limits: limits._tuple(1),
    0x86: lambda limits: limits._tuple(2),
    0x87: lambda limits: limits._tuple(3),
    ord("q"): lambda limits: limits._put(limits._bytes(1)[0]),
    ord("r"): lambda limits: limits._put(limits._number("<I")),
    ord("h"): lambda limits: limits._stack.append(limits._memo[limits._bytes(1)[0]]),
    ord("j"): lambda limits: limits._stack.append(limits._memo[limits._number("<I")]),
    ord("a"): lambda limits: limits._fill([limits._pop()]),
    ord("e"): lambda limits: limits._fill(limits._marked()),
    ord("b"): lambda limits: limits._fill([limits._pop()]),
    ord("s"): lambda limits: limits._set_items([limits._pop(), limits._pop()][::-1]),
    ord("u"): lambda limits: limits._set_items(limits._marked()),
    ord("R"): _Limits._call,
    0x81: _Limits._call,
    ord("Q"): _Limits._storage,
}


def pickle_problem(
    data: bytes, members: Mapping[str, Member], folder: str = "data/", *, script: bool = False
) -> str:
    """Return why a reader of torch must not read a pickle, or an empty text.

    Args:
        data: The pickle.
        members: The members of the file by name, among them the storages.
        folder: The folder of the storages.
        script: True for the reader in C++, which does without some instructions and checks less.
    """
    return _problem_of(_Limits(data, members, folder, script=script).follow)


def legacy_problem(data: bytes) -> str:
    """Return why torch must not read one of the five pickles that a file from before torch 1.6 begins with.

    Args:
        data: The file, or its beginning.
    """

    def follow_all() -> None:
        end = 0
        for _ in range(5):
            end = _Limits(data, {}, "", start=end).follow()

    return _problem_of(follow_all)


def _problem_of(follow: Callable[[], object]) -> str:
    try:
        follow()
    except (IndexError, KeyError, TypeError, AttributeError):
        return "its instructions do not fit together"
    except (ValueError, struct.error) as error:
        return f"{error}"
    return ""
