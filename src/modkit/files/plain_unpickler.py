"""An unpickler for plain state dicts: tensors, numbers and strings in containers.

It reads only files as ``torch.save`` writes them, and leaves all others to torch. So it needs few
names and instructions, and a file that has others never reaches the standard unpickler.

1. :func:`is_for_plain_unpickler` looks at the bytes of the pickle. It bounds the time and the
   memory that the standard unpickler can take.
2. :class:`PlainUnpickler` looks up each name in a table of classes and functions that only build
   tensors, and compares each tensor with its storage, and each storage with its member.
3. :func:`is_plain` looks at the result: what a name stands for may not be an entry itself.

Each of them leaves a file that it does not know to ``torch.load(weights_only=True)``.
"""

import io
import pickle
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from modkit._upstream import shares_all_storages
from modkit.files.pickle_limits import memory_bound, most_memory, storage_dtype
from modkit.files.zip_archive import Archive


_FLOATS: Final = ("BFloat16", "ComplexDouble", "ComplexFloat", "Double", "Float", "Half")
_INTEGERS: Final = ("Bool", "Byte", "Char", "Int", "Long", "Short")
_STORAGES: Final = {name: dtype for name in _FLOATS + _INTEGERS if (dtype := storage_dtype(name))}
_NEWER: Final = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_LEAVES: Final = frozenset(
    {str, int, float, bool, type(None), Tensor, torch.nn.Parameter, torch.dtype, torch.Size}
)
# The instructions that torch.save writes, by their names in the module pickle, each with its
# argument; except those whose argument has a length of its own, which no expression can follow.
_INSTRUCTIONS_WITHOUT_LENGTH: Final = r"""(?:
    # The memo. Its places are below 2 ** 21: the unpickler allocates all below the largest one.
    (?: BINGET | BINPUT ) .
  | LONG_BINPUT ..[\x00-\x1f]\x00
  | LONG_BINGET ....

    # Empty containers, what fills them, and calls.
  | (?: EMPTY_TUPLE | EMPTY_LIST | EMPTY_DICT
      | APPEND | APPENDS | SETITEM | SETITEMS | BUILD | REDUCE | BINPERSID )

    # A tuple of anything is the arguments of a call, or describes a storage: hashing nested tuples
    # may take exponential time. torch.save may memoize it first.
  | (?: TUPLE | TUPLE1 | TUPLE2 | TUPLE3 )
    (?: BINPUT . | LONG_BINPUT ..[\x00-\x1f]\x00 )?
    (?: REDUCE | BINPERSID )

    # Any other tuple holds only numbers: sizes and strides. torch.save never marks an empty batch.
  | MARK (?: NUMBER{1,99} TUPLE | (?! APPENDS | SETITEMS | TUPLE ) )
  | NUMBER{3} TUPLE3
  | NUMBER{2} TUPLE2
  | NUMBER TUPLE1
  | NUMBER

    # A name: two lines, compared with those that are allowed when it is looked up.
  | GLOBAL [^\n]{0,99}\n [^\n]{0,99}\n

    # Strings of one to four bytes: with them, the keys of storages need no match of their own.
  | BINUNICODE (?: \x01\0{3} . | \x02\0{3} .. | \x03\0{3} ... | \x04\0{3} .... )

    # The limit bounds the memory for backtracking; the next match goes on where this one ends.
){0,1000}"""
_NUMBER: Final = (
    "(?: BININT1 . | BININT2 .. | BININT .... | BINFLOAT .{8} | NEWTRUE | NEWFALSE | NONE )"
)


def _compiled(expression: str) -> re.Pattern[bytes]:
    """Compile an expression in which names of the module pickle stand for their opcodes."""

    def opcode(name: re.Match[str]) -> str:
        code: bytes = getattr(pickle, name[0])
        return re.escape(code.decode("latin-1"))

    with_numbers = expression.replace("NUMBER", _NUMBER)
    without_comments = re.sub(r"#.*", "", with_numbers)
    with_opcodes = re.sub(r"[A-Z][A-Z_\d]+", opcode, without_comments)
    return re.compile(with_opcodes.encode("latin-1"), re.DOTALL | re.VERBOSE)


_INSTRUCTIONS: Final = _compiled(_INSTRUCTIONS_WITHOUT_LENGTH)
_PROTOCOL: Final = pickle.PROTO + b"\x02"
_LENGTH: Final = struct.Struct("<L")
_DEEPEST: Final = 100
_SMALL: Final = 8
_VERSIONS: Final = {str(version).encode() for version in range(1, 11)}  # of the container


class _StorageType(NamedTuple):
    """Stands for a class of storages in the pickle."""

    dtype: torch.dtype


class _Storage(NamedTuple):
    """A storage, and what the pickle states about it."""

    storage: torch.UntypedStorage
    device: torch.device
    dtype: torch.dtype
    numel: int
    nbytes: int


class PlainUnpickler(pickle.Unpickler):
    """The standard unpickler with an allow-list of names; UnpicklingError leaves the file to torch.

    Args:
        archive: The file.
        allocate: Returns the storage for a member and the location that it was saved from.
    """

    def __init__(
        self, archive: Archive, allocate: Callable[[str, str], torch.UntypedStorage]
    ) -> None:
        super().__init__(io.BytesIO(archive.text("data.pkl")))
        self._archive = archive
        self._allocate = allocate
        # Storages by key, and the members that the pickle has named.
        self._storages: dict[str, _Storage] = {}
        self._named = set[str]()

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what an allowed name stands for; a KeyError leaves the file to torch."""
        allowed = _NAMES[module, name]
        # Nothing here refers to the unpickler. Its memo, and its stack, which an error leaves
        # filled, are out of sight of the garbage collector: a cycle would keep all tensors.
        return partial(allowed, self._archive) if allowed in _OF_ARCHIVE else allowed

    def persistent_load(self, pid: Any, /) -> _Storage:
        """Return the storage that an entry describes; its member must have that size."""
        if type(pid) is not tuple or tuple(map(type, pid)) != _PID_TYPES:
            raise pickle.UnpicklingError
        tag, kind, key, location, numel = pid
        # torch quotes the location in errors.
        if tag != "storage" or not location.isprintable() or len(location) > 99:
            raise pickle.UnpicklingError
        shared = self._storages.get(key)
        if shared is not None:
            if shared.dtype is not kind.dtype or shared.numel != numel:
                raise pickle.UnpicklingError
            return shared

        name = f"data/{key}"
        stated = numel * kind.dtype.itemsize
        member = self._archive.members.get(name)
        if member is None or member.size != stated:
            # The pickle states two sizes, of which one is right: torch reports that.
            if member is not None and name in self._named:
                raise pickle.UnpicklingError
            size = member.size if member else "no"
            raise self._archive.corrupt(f"{name!r} has {size} bytes, {stated} in the pickle")
        storage = self._allocate(name, location)
        self._named.add(name)
        stored = _Storage(storage, storage.device, kind.dtype, numel, stated)
        # Some releases of torch allocate a storage without memory again each time.
        if shares_all_storages or storage.data_ptr():
            self._storages[key] = stored
        return stored


def _tensor(
    archive: Archive,
    stored: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    *metadata: Any,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rebuild a tensor within its storage, as ``torch._utils._rebuild_tensor_v2``."""
    values = (stored, offset, size, stride, requires_grad, hooks)
    if tuple(map(type, values)) != _TENSOR_TYPES:
        raise pickle.UnpicklingError
    # The metadata are bits for lazy conjugation and negation.
    if hooks or offset < 0 or metadata not in _NO_METADATA:
        raise pickle.UnpicklingError
    element: torch.dtype = stored.dtype if dtype is None else dtype

    last = offset
    for length, step in zip(size, stride, strict=True):
        if type(length) is not int or type(step) is not int or length < 0 or step < 0:
            raise pickle.UnpicklingError
        last += (length - 1) * step
    if (last + 1) * element.itemsize > stored.nbytes and 0 not in size:
        raise archive.corrupt("a tensor extends beyond the end of its storage")

    tensor = torch.empty(0, dtype=element, device=stored.device)
    tensor.set_(stored.storage, offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    tensor._backward_hooks = hooks
    return tensor


def _tensor_of_dtype(archive: Archive, *description: Any) -> Tensor:
    """Rebuild a tensor with a dtype of its own, as ``torch._utils._rebuild_tensor_v3``."""
    dtype = description[6]
    if type(dtype) is not torch.dtype:
        raise pickle.UnpicklingError
    return _tensor(archive, *description[:6], *description[7:], dtype=dtype)


def _parameter(data: Tensor, requires_grad: bool, hooks: Any) -> torch.nn.Parameter:
    """Rebuild a parameter without hooks, as ``torch._utils._rebuild_parameter``."""
    if type(data) is not Tensor or type(hooks) is not OrderedDict or hooks:
        raise pickle.UnpicklingError
    parameter = torch.nn.Parameter(data, requires_grad)
    parameter._backward_hooks = hooks
    return parameter


_PID_TYPES: Final = (str, _StorageType, str, str, int)
_TENSOR_TYPES: Final = (_Storage, int, tuple, tuple, bool, OrderedDict)
_NO_METADATA: Final[tuple[Any, ...]] = ((), ({},))
# They report a corrupt file, and so need the archive.
_OF_ARCHIVE: Final = (_tensor, _tensor_of_dtype)
_NAMES: Final[dict[tuple[str, str], Any]] = {
    **{("torch", f"{name}Storage"): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", str(dtype)[6:]): dtype for dtype in (*_STORAGES.values(), *_NEWER)},
    ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): OrderedDict,
}


def is_for_plain_unpickler(archive: Archive) -> bool:
    """Return True if the unpickler can read a file without harm.

    ``torch.save`` must have written it on a machine of this byte order, with the instructions above
    and a number of containers that its size explains.
    """
    if not _is_as_torch_writes(archive):
        return False
    content = archive.text("data.pkl")
    # A pickle with more containers than this is followed, and refused if they are really in it.
    is_small = memory_bound(content) <= most_memory(len(content), len(archive.members))
    return is_small and _has_known_instructions(content)


def _is_as_torch_writes(archive: Archive) -> bool:
    version_names = [name for name in (".data/version", "version") if name in archive.members]
    version = archive.text(version_names[0]).strip() if version_names else b""
    order = archive.text("byteorder") if "byteorder" in archive.members else None
    if order is None and torch.serialization.get_default_load_endianness() is None:
        order = b"little"
    return version in _VERSIONS and order == sys.byteorder.encode()


def _has_known_instructions(content: bytes) -> bool:
    """Return True if a pickle has only the instructions above, strings and long integers."""
    if not content.startswith(_PROTOCOL) or content[-1:] != pickle.STOP:
        return False

    string = pickle.BINUNICODE[0]
    long_integer = pickle.LONG1[0]
    position = len(_PROTOCOL)
    end = len(content) - 1
    while position < end:
        before = position
        if content[position] == string and position + _LENGTH.size < end:
            position += 1 + _LENGTH.size + _LENGTH.unpack_from(content, position + 1)[0]
        elif content[position] == long_integer:
            position += 2 + content[position + 1]
        run = _INSTRUCTIONS.match(content, position, end)
        position = run.end() if run else position
        if position == before:
            return False
    # A string may state a length that reaches beyond the end.
    return position == end


def is_plain(content: Any, seen: set[int], depth: int = 0) -> bool:
    """Return True if there are only tensors, numbers and strings in dicts, lists and tuples.

    Args:
        content: What an unpickler has made.
        seen: The identities of containers that have been looked into; they are added here.
        depth: The number of containers around the content.
    """
    kind = type(content)
    inner = content
    if kind in _LEAVES or id(content) in seen:
        return True
    # Deeper nesting is left to pickle_problem.
    if depth >= _DEEPEST:
        return False

    if kind is dict or kind is OrderedDict:
        attributes = vars(content).values() if kind is OrderedDict else ()
        inner = [*dict.keys(content), *dict.values(content), *attributes]
    elif kind is not list and kind is not tuple:
        return False

    # To visit a small container again takes less than to remember it.
    has_leaves_only = all(type(item) in _LEAVES for item in inner)
    if not has_leaves_only or len(inner) > _SMALL:
        seen.add(id(content))
    return has_leaves_only or all(is_plain(item, seen, depth + 1) for item in inner)
