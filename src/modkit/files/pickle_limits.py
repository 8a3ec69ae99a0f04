"""Limits on what a pickle may make torch's readers do: nesting, hashing, memory.

In C++, deep nesting overflows the stack, and a storage is as large as the pickle states. In Python,
hashing nested tuples takes exponential time, and a byte may make an object of 200. This module
follows the instructions without making the objects.

The limits, each with the attack that it stops:

- levels of nesting: a stack overflow in the reader or in the destructor of what it has made;
- objects that are visited for hashes: tuples within tuples, which double the time with each level;
- memory of containers, linear in the size of the pickle: a file of 5 MB that takes 700 MB;
- places of the memo: one number that makes a reader allocate all places below it;
- sizes of storages: one number that makes a reader allocate terabytes;
- objects of NumPy: a dtype whose flags make readers take numbers for addresses.
"""

import gc
import pickle
import pickletools
import re
import warnings
from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias


DEEPEST: Final = 1000
# The bytes of an element, by torch's names of dtypes.
ITEM_SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8"), 1),
    **dict.fromkeys(("bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "qint32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
# Other names of dtypes, in those of storages.
_ALIASES: Final = dict(
    zip(
        ("byte", "char", "short", "int", "long", "half", "float", "double", "untyped"),
        ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "uint8"),
        strict=True,
    ),
    complexhalf="complex32",
    complexfloat="complex64",
    complexdouble="complex128",
)
# The instructions of torch's readers, by their names in pickletools.
_TUPLES: Final = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_EMPTY: Final = {"EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_FILLS: Final = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD", "ADDITEMS"}
_CALLS: Final = {"GLOBAL", "REDUCE", "NEWOBJ", "BINPERSID", "STACK_GLOBAL"}
_NUMBERS: Final = {"BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"}
_STRINGS: Final = {"BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE"}
_MEMO: Final = {"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE"}
_STACK: Final = {"PROTO", "FRAME", "MARK", "POP", "DUP", "STOP"}
_CONSTANTS: Final[dict[str, object]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_KNOWN: Final = (
    _TUPLES | _EMPTY | _FILLS | _CALLS | _NUMBERS | _STRINGS | _MEMO | _STACK | set(_CONSTANTS)
)
# Those of which equal ones share an object.
_SHARED: Final = {*_CONSTANTS, "BININT1", "BININT2"}
_BYTES: Final = ("__builtin__.bytes", "builtins.bytes")
# Classes of Python that a pickle may hold as values. To call them could take any time and memory.
_NAMES_OF_VALUES: Final = ("bool", "float", "int", "list", "object", "str", "tuple")
VALUES: Final = {
    f"{module}.{name}": name for module in ("builtins", "__builtin__") for name in _NAMES_OF_VALUES
}
# pickle writes the names of Python 2.
VALUES.update({"__builtin__.long": "int", "__builtin__.unicode": "str"})
Reader: TypeAlias = Literal["torch", "script", "inert"]
_HASHING: Final = (".OrderedDict", ".Counter", ".set", ".dict", ".frozenset")


def _taken_by(opcode: pickletools.OpcodeInfo) -> tuple[int, bool]:
    """Return how many objects an instruction takes, and True if it takes all above a mark too."""
    taken = opcode.stack_before
    if pickletools.markobject in taken:
        return taken.index(pickletools.markobject), True
    return len(taken), False


_TAKEN: Final = {
    opcode.name: _taken_by(opcode)
    for opcode in pickletools.opcodes
    if opcode.name in _KNOWN - {"DUP", "MEMOIZE"} and opcode.stack_before
}

# Bytes that readers allocate at an instruction. torch.save memoizes each container, which takes 5
# bytes besides those of its own instruction and of its content. So the most that its pickles need
# is 27 for a byte, for dicts of one entry: 80 + 168 for ``}r....\x88Ns``. Below that, real
# checkpoints are refused.
_COSTS: Final = {
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT"), 80),
    **dict.fromkeys(_TUPLES, 112),
    **dict.fromkeys(("SETITEM", "SETITEMS"), 168),
    **dict.fromkeys(("APPEND", "APPENDS", "ADDITEMS", "REDUCE", "NEWOBJ"), 32),
    **dict.fromkeys(("EMPTY_SET", "BINPERSID"), 256),
}
_CALL_COSTS: Final = {"OrderedDict": 128, "Counter": 224, "set": 224, "frozenset": 224, "dict": 72}
_REBUILD_COST: Final = 320  # of a tensor or a parameter
_FOREIGN_COST: Final = 96  # of an object in place of one of an unknown class
_FREE_MEMORY: Final = 16 << 20
_MEMORY_PER_BYTE: Final = 28
_MEMORY_PER_MEMBER: Final = 2048


def most_memory(size: int, members: int) -> int:
    """Return how much memory the containers in a pickle may take, in bytes.

    Args:
        size: The size of the pickle in bytes.
        members: The number of members of its archive, each of which may be a tensor.
    """
    return _FREE_MEMORY + _MEMORY_PER_BYTE * size + _MEMORY_PER_MEMBER * members


def memory_bound(data: bytes) -> int:
    """Return at least the memory of the containers in a pickle, without parsing its strings."""
    calls = data.count(pickle.REDUCE) * max(_REBUILD_COST, *_CALL_COSTS.values())
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


def storage_dtype(kind: str) -> str | None:
    """Return the name of the dtype of a class of storages, as ``FloatStorage``, or None."""
    name = kind.removesuffix("Storage").lower()
    name = _ALIASES.get(name, name)
    return name if name in ITEM_SIZES else None


def pickle_problem(
    data: bytes,
    sizes: Mapping[str, int],
    folder: str = "data/",
    *,
    reader: Reader = "torch",
    trusted: Container[str] = (),
) -> str:
    """Return why torch must not read a pickle, or ``""``.

    Args:
        data: The pickle.
        sizes: The sizes of the members of the archive, to compare those of storages.
        folder: The folder of the storages.
        reader: Who reads it: torch's unpickler of ``weights_only=True``; ``"script"`` for torch's
            reader in C++; ``"inert"`` for the one of :mod:`~modkit.files.inert`. The last two
            accept no instructions that are unknown here.
        trusted: Names of NumPy that the user has allowed with any argument.
    """
    try:
        with warnings.catch_warnings(), collector_paused():
            # pickletools warns of invalid escapes in instructions that torch does not have.
            warnings.simplefilter("ignore")
            _Follower(len(data), sizes, folder, reader, trusted).follow(data)
    except (IndexError, KeyError, TypeError, AttributeError):
        return "its instructions do not fit together"
    except ValueError as error:
        return str(error)
    return ""


# Contents of objects that are not constants.
_OPAQUE: Final = object()
_NO_ITEMS: Final = ()  # of an empty container; many of them take little memory
_DTYPE: Final = object()
_ARRAY: Final = object()
# The dtypes of numbers. Other dtypes have flags, and fields, that are addresses of objects.
_CODE: Final = re.compile("b1|[iu][1248]|f[248]|c8|c16")
_DTYPE_STATES: Final = [[3, order, None, None, None, -1, -1, 0] for order in "<>|="]


class _Object:
    """An object on the stack, without its value.

    Args:
        content: The items of a container, a name, a string or a number; ``_OPAQUE`` for other
            objects. Kept as an attribute.

    Attributes:
        depth: Levels of nesting below it.
        weight: How many objects its hash visits.
        held: Whether another object contains it.
    """

    __slots__ = ("content", "depth", "held", "weight")

    def __init__(self, content: Any = _OPAQUE) -> None:
        self.content = content
        self.depth = 0
        self.weight = 1
        self.held = False

    def hold(self, items: "list[_Object]", *, strict: bool) -> None:
        depth = self.depth
        for item in items:
            if item.depth >= depth:
                depth = item.depth + 1
        if depth > DEEPEST:
            raise ValueError(f"it nests deeper than {DEEPEST:,} levels")
        if strict and depth > self.depth and self.held:
            # The depth of its holder would no longer be right. No pickler of torch writes this.
            raise ValueError("it fills an object that is part of another one already")
        self.depth = depth
        for item in items:
            item.held = True


class _Number(_Object):
    """A small number or constant; one object stands for all that are equal."""

    __slots__ = ()

    def hold(self, items: "list[_Object]", *, strict: bool) -> None:
        raise TypeError


class _Follower:
    """Follows the instructions of one pickle, and raises ValueError where they exceed a limit."""

    def __init__(
        self,
        size: int,
        sizes: Mapping[str, int],
        folder: str,
        reader: Reader,
        trusted: Container[str],
    ) -> None:
        self._size = size
        self._sizes = sizes
        self._folder = folder
        self._script = reader == "script"
        self._inert = reader == "inert"
        self._trusted = trusted

        # The state of the unpickler.
        self._stack: list[_Object] = []
        self._memo: dict[int, _Object] = {}
        self._marks: list[int] = []
        self._numbers: dict[tuple[str, object], _Number] = {}
        self._storages: set[str] = set()

        # The rest of the limits: objects to hash, and bytes to allocate.
        self._work = 10_000 + 10 * size
        self._memory = most_memory(size, len(sizes))

    def follow(self, data: bytes) -> None:
        """Follow the pickle, up to an instruction that torch does not have."""
        argument: Any
        for instruction, argument, _ in pickletools.genops(data):
            name = instruction.name
            # Objects that contain themselves, which torch writes and does not read.
            is_circular = self._inert and name in {"POP", "DUP"}
            if name not in _KNOWN or is_circular:
                if self._script or self._inert:
                    raise ValueError(f"it has the instruction {name}, which is not read here")
                return

            if name in _COSTS:
                self._spend(_COSTS[name])
            if name in _TAKEN:
                self._take(name)
            else:
                self._push(name, argument)

    def _push(self, name: str, argument: Any) -> None:
        """Follow an instruction that takes nothing from the stack."""
        if name == "MARK":
            if len(self._marks) > 2 * DEEPEST:
                raise ValueError(f"it nests deeper than {DEEPEST:,} levels")
            self._marks.append(len(self._stack))
        elif name in {"BINPUT", "LONG_BINPUT"}:
            # torch's reader in C++ allocates all places below.
            if argument > self._size:
                raise ValueError(f"it stores an object at place {argument}")
            self._memo[argument] = self._stack[-1]

        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]

        # The others push an object.
        elif name in {"BINGET", "LONG_BINGET"}:
            self._stack.append(self._memo[argument])
        elif name == "DUP":
            self._stack.append(self._stack[-1])
        elif name in _SHARED:
            content = _CONSTANTS.get(name, argument)
            number = self._numbers.setdefault((name, argument), _Number(content))
            self._stack.append(number)
        elif name not in {"PROTO", "FRAME"}:
            self._stack.append(_Object(_NO_ITEMS if name in _EMPTY else argument))

    def _spend(self, memory: int) -> None:
        self._memory -= memory
        if self._memory < 0:
            raise ValueError(
                f"it makes more objects than its size explains: {self._size:,} bytes would take "
                "many times their memory"
            )

    def _take(self, name: str) -> None:
        """Follow an instruction that takes objects from the stack."""
        below_mark, is_marked = _TAKEN[name]
        begin = (self._marks.pop() if is_marked else len(self._stack)) - below_mark
        if begin < (self._marks[-1] if self._marks else 0):
            raise IndexError
        taken = self._stack[begin:]
        del self._stack[begin:]

        if name in _TUPLES:
            made = _Object(taken)
            for item in taken:
                made.weight += item.weight
            made.hold(taken, strict=self._script)
            self._stack.append(made)
        elif name in _FILLS:
            self._fill(name, taken)
        elif name in {"REDUCE", "NEWOBJ"}:
            self._call(*taken)
        elif name == "STACK_GLOBAL":
            self._stack.append(_Object(" ".join(_contents(taken))))
        elif name == "BINPERSID":
            self._storage(taken[0])

    def _fill(self, name: str, taken: list[_Object]) -> None:
        """Put items into a container, or a state into an object."""
        target, *items = taken
        if name == "BUILD":
            _check_state_of_numpy(target, items[0])
        elif name in {"SETITEM", "SETITEMS"}:
            for key in items[::2]:
                self._hash(key)
        elif name == "ADDITEMS":
            for key in items:
                self._hash(key)

        if target.content is _NO_ITEMS:
            target.content = items
        elif isinstance(target.content, list):
            target.content += items
        target.hold(items, strict=self._script)
        self._stack.append(target)

    def _hash(self, value: _Object, levels: int = 0) -> None:
        """Count the work of hashing an object, and the objects in it down to some levels."""
        self._work -= value.weight
        if self._work < 0:
            raise ValueError("it holds tuples within tuples that take too long to hash")
        if levels and isinstance(value.content, list):
            for item in value.content:
                self._hash(item, levels - 1)

    def _call(self, function: _Object, arguments: _Object) -> None:
        result = _Object()
        result.hold([arguments], strict=self._script)
        self._stack.append(result)

        name = function.content.replace(" ", ".") if isinstance(function.content, str) else ""
        is_rebuilt = name.startswith("torch") and "_rebuild_" in name
        other_cost = _FOREIGN_COST if self._inert else 0
        cost = _CALL_COSTS.get(name.rpartition(".")[2], other_cost)
        self._spend(_REBUILD_COST if is_rebuilt else cost)

        values = arguments.content if isinstance(arguments.content, list) else []
        if name.endswith(_HASHING):
            self._hash(arguments, 3)
        elif name == "_codecs.encode" and _contents(values)[1:] != ["latin1"]:
            # Some encodings take quadratic time; pickle uses only this one.
            raise ValueError("it encodes a string in another way than pickle does")
        elif name == "_codecs.encode":
            # One long string could be encoded by a few bytes each time.
            self._spend(len(str(_contents(values)[0])))
        elif name in _BYTES and values and name not in self._trusted:
            raise ValueError("it makes bytes in another way than pickle does")
        elif name in VALUES and not self._inert:
            raise ValueError(f"it calls {name}, which torch does not")
        elif name.startswith("numpy") and name not in self._trusted and not self._inert:
            result.content = _made_by_numpy(name, values)

    def _storage(self, identifier: _Object) -> None:
        """Compare the size of a storage with that of its member."""
        fields = identifier.content
        self._stack.append(_Object())
        if not isinstance(fields, list) or len(fields) != 5:
            self._hash(identifier, 2)
            return

        _, kind, key, location, numel = _contents(fields)
        is_nested = fields[3].weight > 1 or isinstance(location, (list, tuple))
        if not isinstance(key, (str, int)) or is_nested:
            raise ValueError("it names a storage by something else than a string")
        name = f"{self._folder}{key}"
        stored = self._sizes.get(name)
        dtype = storage_dtype(str(kind).rpartition(" ")[2])
        if type(numel) is not int or dtype is None or "\0" in str(key):
            raise ValueError(f"it names the storage {key!r} in another way than torch does")

        size = numel * ITEM_SIZES[dtype]
        # torch.load makes a storage once, whatever the pickle states about it later.
        if str(key) in self._storages and size and not self._script:
            return
        self._storages.add(str(key))
        # A script has no values of tensors on the meta device, and reads none for them.
        is_empty = self._script and location == "meta" and stored == 0
        if stored is not None and size != stored and not is_empty:
            raise ValueError(f"{name!r} has {stored} bytes, not {size}")


def _contents(items: Any) -> list[Any]:
    return [item.content for item in items] if isinstance(items, list) else []


def _made_by_numpy(name: str, arguments: list[_Object]) -> object:
    """Return what a call of NumPy makes; raise ValueError if that is not numbers."""
    contents = _contents(arguments)
    if name == "numpy.dtype":
        # The copy matters: the state of the original is that of the whole process.
        is_number = contents[1:] == [False, True] and isinstance(contents[0], str)
        if is_number and _CODE.fullmatch(contents[0]):
            return _DTYPE
    elif name.endswith(".multiarray._reconstruct"):
        if contents[0] == "numpy ndarray" and _contents(contents[1]) == [0]:
            return _ARRAY
    elif name.endswith(".multiarray.scalar") and contents[0] is _DTYPE:
        return _OPAQUE
    raise ValueError(
        "it has strings, dates, records or objects of NumPy. If you trust the file, load it inside "
        "torch.serialization.safe_globals([np._core.multiarray._reconstruct, "
        "np._core.multiarray.scalar, np.ndarray, np.dtype]), and save numbers, str(value) or lists"
    )


def _check_state_of_numpy(target: _Object, state: _Object) -> None:
    """Raise ValueError if the state of a dtype or an array is not that of numbers."""
    contents = _contents(state.content)
    if target.content is _DTYPE and contents not in _DTYPE_STATES:
        raise ValueError("it has a dtype of NumPy that is not one of numbers")
    if target.content is _ARRAY and (len(contents) != 5 or contents[2] is not _DTYPE):
        raise ValueError("it has an array of NumPy that is not one of numbers")
