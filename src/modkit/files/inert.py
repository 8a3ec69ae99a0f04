"""The content of a pickle without its classes: descriptions of tensors, and placeholders.

Nothing is imported and no code of the file or of a library is executed: each name in the pickle
stands for a function of this file that only keeps its arguments. So the tensors of a checkpoint can
be listed and read, whatever else is in it. Nothing here needs torch.
"""

import argparse
import builtins
import io
import math
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, cast

from typing_extensions import Self

from modkit.errors import FileError
from modkit.files.pickle_limits import (
    CLASS_COST,
    BoundedUnpickler,
    check_depth,
    collector_paused,
)
from modkit.files.plain_pickles import is_plain_pickle


# The bytes of an element, by torch's names of dtypes.
ITEM_SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8"), 1),
    **dict.fromkeys(("bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "qint32", "complex32", "bcomplex32"), 4),
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
_MOST_DIMENSIONS: Final = 64
_LONGEST_LOCATION: Final = 99


# A constant that all files share has no ``__dict__`` and no state, which a pickle could set.
class Constant(str):
    """A dtype of torch, by its ``repr``."""

    __slots__ = ()
    __repr__ = str.__str__


class Function(NamedTuple):
    """A function that a pickle may call."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self.function(*args)


class StorageKind(NamedTuple):
    """A class of storages: the name of the dtype of its elements."""

    dtype: str


class Stored(NamedTuple):
    """A storage as a pickle describes it, with the device that it was saved from."""

    key: str
    dtype: str
    numel: int
    location: str
    # In files from before torch 1.6, it may be a part of another storage: where it begins there.
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * ITEM_SIZES[self.dtype]


@dataclass(slots=True, eq=False)
class InertTensor:
    """A tensor as a pickle describes it.

    Attributes:
        dtype: The name of its dtype.
        shape: Its shape.
        storage: Its storage; None if it is in parts.
        offset: Where it begins in the storage, in elements.
        stride: Its strides.
        bits: The bits of a lazy view: ``"conj"``, ``"neg"``.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: Stored | None = None
    offset: int = 0
    stride: tuple[int, ...] = ()
    bits: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        # Those that torch lacks are F4, for instance.
        if self.storage is not None and self.dtype not in ITEM_SIZES:
            return self.storage.nbytes
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Foreign:
    """An object of a class that was not imported, with what the pickle gave to it.

    Attributes:
        name: The name of the class.
        made: The objects of the class.
    """

    __slots__ = ("args", "content", "state")
    name = ""
    made: ClassVar[list["Foreign"]] = []
    args: tuple[Any, ...]
    content: Any
    state: Any

    def __new__(cls, *args: Any) -> Self:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args = args
        made.content = made.state = None
        cls.made.append(made)
        return made

    def set_state(self, state: Any) -> None:
        """Keep the state."""
        if self.state is not None:
            raise pickle.UnpicklingError("an object has two states")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(self.content, dict):
            self.content = {}
        self.content[key] = value

    def append(self, value: Any) -> None:
        """Keep an item of a list."""
        if not isinstance(self.content, list):
            self.content = []
        self.content.append(value)

    def entries(self) -> Mapping[Any, Any]:
        """Return its items, or else its attributes, by name."""
        state = self.state
        # Objects with slots have a pair: their attributes, and the slots.
        if isinstance(state, tuple) and len(state) == 2:
            state = state[1] or state[0]
        # A collections.UserDict has its items in one attribute.
        if isinstance(state, dict) and [*state] == ["data"]:
            state = state["data"]
        for entries in (self.content, state):
            if isinstance(entries, list):
                return {str(index): value for index, value in enumerate(entries)}
            if isinstance(entries, dict) and entries:
                return entries
        return {}


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        raise pickle.UnpicklingError("a tensor has another shape than torch makes")
    for length in value:
        if type(length) is not int or not 0 <= length < 2**63:
            raise pickle.UnpicklingError("a tensor has another shape than torch makes")
    return tuple(value)


def _tensor(
    stored: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    bits: Any = None,
    dtype: Any = None,
) -> InertTensor:
    """Describe a tensor within its storage, as ``torch._utils._rebuild_tensor_v2``."""
    if not isinstance(stored, Stored) or type(offset) is not int or not 0 <= offset < 2**62:
        raise pickle.UnpicklingError("a tensor has no storage")
    element = stored.dtype if dtype is None else _dtype(dtype)
    tensor = InertTensor(element, _sizes(size), stored, offset, _sizes(stride))
    if bits:
        if type(bits) is not dict or not bits.keys() <= {"conj", "neg"}:
            raise pickle.UnpicklingError("a tensor is a lazy view in another way than in torch")
        tensor.bits = frozenset(name for name, is_set in bits.items() if is_set)
        if "conj" in tensor.bits and "complex" not in element:
            raise pickle.UnpicklingError("a tensor of real numbers is conjugated")

    last = offset
    for length, step in zip(tensor.shape, tensor.stride, strict=True):
        last += (length - 1) * step
    if (last + 1) * ITEM_SIZES[element] > stored.nbytes and tensor.nbytes:
        raise pickle.UnpicklingError("a tensor extends beyond the end of its storage")
    return tensor


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.") if type(value) is Constant else ""
    if name not in ITEM_SIZES:
        raise pickle.UnpicklingError("a tensor has a dtype that torch does not have")
    return name


def _tensor_of_dtype(*description: Any) -> InertTensor:
    """Describe a tensor with a dtype of its own, as ``torch._utils._rebuild_tensor_v3``."""
    dtype, *bits = description[6:]
    return _tensor(*[*description[:6], *(bits or [None]), dtype])


def _parameter(data: Any, requires_grad: Any, hooks: Any, *attributes: Any) -> Any:
    return data


def _of_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Describe a tensor of a subclass, as ``torch._tensor._rebuild_from_type_v2``."""
    if isinstance(function, Function) and function.function in {_tensor, _tensor_of_dtype}:
        return function(*args)
    # Other functions have costs that were not paid, and NumPy's objects would get the state.
    is_class = isinstance(function, type) and issubclass(function, Foreign)
    if not is_class or getattr(function, "name", "").startswith("numpy"):
        raise pickle.UnpicklingError("a tensor is made by another function than those of torch")
    made = function()
    # As a call would copy them: many calls could share one long tuple.
    made.args = args
    return made


def _empty_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _encoded(string: str, encoding: str) -> bytes:
    # Some encodings take quadratic time; pickle uses only this one.
    if encoding != "latin1":
        raise pickle.UnpicklingError("it encodes a string in another way than pickle does")
    return string.encode("latin1")


def _empty_bytes(*size: Any) -> bytes:
    if size:
        raise pickle.UnpicklingError("it makes bytes in another way than pickle does")
    return b""


# The names of state dicts without anything else.
_PLAIN_NAMES: Final[dict[str, Any]] = {
    "torch._utils._rebuild_tensor_v2": Function(_tensor),
    "torch._utils._rebuild_tensor_v3": Function(_tensor_of_dtype),
    "torch._utils._rebuild_parameter": Function(_parameter),
    **{f"torch.{dtype}": Constant(f"torch.{dtype}") for dtype in ITEM_SIZES},
    "torch.Size": Function(_sizes),
    "torch.storage.UntypedStorage": StorageKind("uint8"),
    "collections.OrderedDict": Function(_empty_dict),
}
_NAMES: Final[dict[str, Any]] = {
    **_PLAIN_NAMES,
    "torch._utils._rebuild_tensor": Function(_tensor),
    "torch._utils._rebuild_parameter_with_state": Function(_parameter),
    "torch._tensor._rebuild_from_type_v2": Function(_of_subclass),
    "builtins.set": set,
    "builtins.complex": complex,
    "builtins.bytes": Function(_empty_bytes),
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "argparse.Namespace": argparse.Namespace,
    "_codecs.encode": Function(_encoded),
}
# Names that torch reads besides; objects of theirs are listed by these names.
_OF_TORCH: Final = re.compile(
    r"torch\.(_utils\._rebuild_\w+|per_\w+|device|serialization\._get_layout)"
)
# Classes of Python that a pickle may hold as values. To call them could take any time and memory.
VALUES: Final[dict[str, Any]] = {
    f"builtins.{name}": getattr(builtins, name)
    for name in ("bool", "float", "int", "list", "object", "str", "tuple")
}
# The names that load_checkpoint reads too: numbers, arrays and random states of NumPy.
_OF_NUMPY: Final = {
    *("numpy.dtype", "numpy.ndarray", "numpy.core.multiarray.scalar"),
    *("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
    "numpy.core.multiarray._reconstruct",
}
# The dtypes of numbers. Other dtypes have flags, and fields, that are addresses of objects.
_NUMBER: Final = re.compile("b1|[iu][1248]|f[248]|c8|c16")
_DTYPE_STATES: Final = [None, *((3, order, None, None, None, -1, -1, 0) for order in "<>|=")]


@dataclass
class Content:
    """The content of a pickle.

    Attributes:
        value: The object.
        names: The names of all classes and functions in it.
        classes: The placeholders for those that this reader does not know.
        storages: The storages of its tensors by key.
        is_odd: Whether a storage is described in a way that only torch reads.
    """

    value: Any = None
    names: set[str] = field(default_factory=set[str])
    classes: dict[str, type[Foreign]] = field(default_factory=dict[str, type[Foreign]])
    storages: dict[str, Stored] = field(default_factory=dict[str, Stored])
    is_odd: bool = False

    @property
    def foreign(self) -> list[str]:
        """The names of classes and functions that ``load_checkpoint`` may not read."""
        known = {*_OF_NUMPY, *VALUES}
        return [
            name for name in self.classes if name not in known and not _OF_TORCH.fullmatch(name)
        ]

    @property
    def has_items(self) -> bool:
        """Whether objects have items, which torch's readers set only of lists and dicts."""
        return any(made.content for kind in self.classes.values() for made in kind.made)

    def problem(self, trusted: Container[str]) -> str:
        """Return why torch must not read the pickle although it may have all names, or ``""``.

        Args:
            trusted: Names that the user has allowed with any argument.
        """
        try:
            check_depth(self.value, _items_of)
            for name, kind in self.classes.items():
                if name in VALUES and kind.made:
                    return f"it calls {name}, which torch does not"
                is_of_numpy = name.startswith("numpy") and name not in trusted
                if is_of_numpy and not all(map(_is_of_numbers, kind.made)):
                    return _OTHER_NUMPY
        except pickle.UnpicklingError as error:
            return str(error)
        # NumPy's functions have other arguments.
        except (LookupError, TypeError):
            return _OTHER_NUMPY
        return ""


_OTHER_NUMPY: Final = (
    "it has strings, dates, records or objects of NumPy. If you trust the file, load it inside "
    "torch.serialization.safe_globals([np._core.multiarray._reconstruct, "
    "np._core.multiarray.scalar, np.ndarray, np.dtype]), and save numbers, str(value) or lists"
)


def _is_of_numbers(made: Foreign) -> bool:
    """Return True for a number, an array of numbers, or their dtype."""
    args, state = made.args, made.state
    if made.name == "numpy.dtype":
        # The copy matters: the state of the original is that of the whole process.
        is_number = type(args[0]) is str and bool(_NUMBER.fullmatch(args[0]))
        return is_number and args[1:] == (False, True) and state in _DTYPE_STATES
    if made.name.endswith(".multiarray._reconstruct"):
        is_array = getattr(args[0], "name", "") == "numpy.ndarray" and args[1] == (0,)
        return is_array and (state is None or (len(state) == 5 and _is_dtype(state[2])))
    return made.name.endswith(".multiarray.scalar") and _is_dtype(args[0])


def _is_dtype(value: object) -> bool:
    return isinstance(value, Foreign) and value.name == "numpy.dtype"


def _items_of(entry: Any) -> Iterable[object] | None:
    """Return the objects that one holds, or None."""
    if isinstance(entry, Foreign):
        return (entry.args, entry.content, entry.state)
    # load_checkpoint has another function than torch in its place.
    if isinstance(entry, Function) and entry.function is _tensor:
        raise pickle.UnpicklingError("it holds a function that rebuilds tensors as a value")
    if isinstance(entry, dict):
        return (*entry, *entry.values(), getattr(entry, "__dict__", None))
    if isinstance(entry, argparse.Namespace):
        return (vars(entry),)
    return entry if isinstance(entry, (list, tuple, set)) else None


def full_name(module: str, name: str) -> str:
    """Return the name of a class or function; pickles have the modules of Python 2."""
    module, name = NAME_MAPPING.get((module, name), (module, name))
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


class _Reader:
    """How both unpicklers read names and storages: as what the functions above make of them."""

    def __init__(self, names: Mapping[str, Any], *source: Any) -> None:
        super().__init__(*source)
        self._names = names
        self.content = Content()

    def read_content(self) -> Content:
        self.content.value = cast("Any", self).load()
        self.content.is_odd |= getattr(self, "has_later", False)
        return self.content

    def find_class(self, module: str, name: str) -> Any:
        full = full_name(module, name)
        self.content.names.add(full)
        if full in self._names:
            return self._names[full]
        element = name.removesuffix("Storage").lower()
        dtype = _ALIASES.get(element, element)
        if module in {"torch", "torch.cuda"} and name.endswith("Storage") and dtype in ITEM_SIZES:
            return StorageKind(dtype)

        classes = self.content.classes
        if full not in classes:
            if not isinstance(self, BoundedUnpickler):
                raise pickle.UnpicklingError(full)
            self.spend(CLASS_COST)
            members = {"name": full, "__slots__": (), "made": []}
            classes[full] = type("Foreign", (Foreign,), members)
        return classes[full]

    def persistent_load(self, pid: Any) -> Any:
        # The modules of files from before torch 1.6 come with their source code.
        if pid[0] == "module" and self._names is _NAMES:
            self.content.is_odd = True
            return pid[1]
        tag, kind, key, location, numel, *view = pid
        is_known = tag == "storage" and isinstance(kind, StorageKind) and type(numel) is int
        is_named = type(key) in {str, int} and type(location) is str and "\0" not in str(key)
        if not is_known or not is_named or numel < 0:
            raise pickle.UnpicklingError("a storage is described in another way than torch does")
        stored = Stored(str(key), kind.dtype, numel, location)
        first = self.content.storages.setdefault(stored.key, stored)
        # The reader of scripts makes it each time.
        if not self._names and first.nbytes != stored.nbytes:
            raise pickle.UnpicklingError(f"the storage {key!r} has two sizes")
        # torch takes the first description, and quotes the location in errors.
        is_usual = len(location) <= _LONGEST_LOCATION and location.isprintable()
        self.content.is_odd |= first[:3] != stored[:3] or not is_usual
        # In files from before torch 1.6, a storage may be a part of another one.
        if view and view[0] is not None:
            _, offset, size = view[0]
            if not 0 <= offset <= offset + size <= numel:
                raise pickle.UnpicklingError(f"a part of the storage {key!r} is outside of it")
            return first._replace(numel=size, offset=offset)
        return first


class _PlainReader(_Reader, pickle.Unpickler):
    """The unpickler in C, for pickles that cannot exceed a limit."""


class _BoundedReader(_Reader, BoundedUnpickler):
    """The unpickler with limits, for all others."""


def read_pickle(data: bytes, what: str, members: int = 0) -> Content:
    """Return the content of a pickle with placeholders.

    Args:
        data: The pickle.
        what: How errors name the file.
        members: The number of members of its archive.

    Raises:
        FileError: If the pickle is invalid or exceeds the limits.
    """
    with collector_paused():
        if is_plain_pickle(data, members):
            # A plain pickle with other names, or an invalid one, is read with limits.
            with suppress(Exception):
                return _PlainReader(_PLAIN_NAMES, io.BytesIO(data)).read_content()
        refused = f"{what} cannot be read as a checkpoint"
        try:
            return _BoundedReader(_NAMES, data, members).read_content()
        # Functions get the arguments that the file has.
        except Exception as error:
            reason = str(error).partition("\n")[0][:500] or type(error).__name__
            raise FileError(f"{refused}: its pickle is invalid: {reason}") from error


def read_script_pickle(data: bytes) -> Content:
    """Return the content of a pickle of a TorchScript archive; raise any error if it is invalid."""
    with collector_paused():
        content = _BoundedReader({}, data).read_content()
        check_depth(content.value, _items_of)
    return content
