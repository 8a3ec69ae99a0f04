"""Checkpoints of ``torch.save`` and TorchScript archives: written atomically, read with verified checksums.

A fast path reads plain state dicts, with an allow-list of names, and verifies memory as it is read. Other
files are verified, then read by ``torch.load(weights_only=True)``. Neither executes code from the file.
"""

import ctypes
import io
import mmap as memory_map
import os
import pickle
import re
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from modkit._namespace import publish
from modkit._upstream import (
    allowed_by_user,
    load_with_names,
    modes_are_active,
    tensors_are_fake,
)
from modkit.errors import FileError
from modkit.files import kinds
from modkit.files.atomic_write import atomic_write
from modkit.files.checkpoint_values import checked_pickle, extra_names
from modkit.files.pickle_limits import collector_paused, pickle_problem, storage_dtype
from modkit.files.zip_archive import Archive, open_regular, path_of, read_some


__all__ = ["load_checkpoint", "save_checkpoint"]

_LOCK: Final = threading.Lock()
_CRC_OPTIONS: Final[list[bool]] = []


class UnsafeFileError(FileError):
    """A pickle is more than plain data."""


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as ``torch.save`` does, but atomically and always with checksums.

    After a killed process, a full disk or an error, ``path`` is the previous file or the complete new one.
    An OSError has ``errno`` and the path.

    Args:
        checkpoint: Dicts, lists, tuples and sets of tensors, numbers, strings and bytes, with numbers and
            small arrays of NumPy, random states and ``argparse.Namespace``.
        path: The file; its folder must exist. A symbolic link is followed.

    Raises:
        TypeError: ``load_checkpoint`` would refuse an entry, for instance a path or a module. The text
            says where it is, and what to save instead. Nothing is written.
        ValueError: The checkpoint has more than 128 MB without its tensors.
        OSError: The file cannot be written.

    Example:
        >>> from modkit import load_checkpoint, nn, save_checkpoint
        >>> path = tmp_path / "last.pt"
        >>> save_checkpoint({"model": nn.Linear(2, 1).state_dict(), "epoch": 3}, path)
        >>> load_checkpoint(path)["epoch"]
        3
    """
    write_checkpoint(checkpoint, path, checked_pickle())


def write_checkpoint(
    content: object, path: str | os.PathLike[str], pickle_module: Any = pickle
) -> None:
    """Write any object as ``torch.save`` does, but atomically and always with checksums."""
    with atomic_write(path) as unfinished, checksums_on():
        torch.save(content, unfinished, pickle_module=pickle_module)


@contextmanager
def checksums_on() -> Generator[None]:
    """Make torch write checksums in a block; blocks of several threads may overlap."""
    with _LOCK:
        _CRC_OPTIONS.append(torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        with _LOCK:
            # All but the first entry are True, so the last block to end restores the user's option.
            torch.serialization.set_crc32_options(_CRC_OPTIONS.pop())


def load_checkpoint(
    path: str | os.PathLike[str], map_location: Any = None, *, mmap: bool = False
) -> Any:
    """Read a file of ``torch.save`` after verifying its checksums.

    Returns what ``torch.load(path, map_location, weights_only=True)`` returns, faster. ``torch.load``
    ignores the checksums: a flipped bit in the file silently becomes another weight.

    Args:
        path: The file.
        map_location: Device of the tensors, as in ``torch.load``.
        mmap: Map the file into memory instead of reading the tensors. It must not be changed in place
            while they are in use; replacing it, as ``save_checkpoint`` does, is safe.

    Raises:
        FileError: If it is corrupt, has no checksums, or cannot be loaded with ``weights_only=True``.
    """
    with open_regular(path) as descriptor, collector_paused():
        archive = _archive_of(descriptor, os.fspath(path), kinds.TORCH_SAVE)
        if not archive.has_checksums:
            advice = "without checksums; torch.load(path, weights_only=True) reads it unverified"
            raise FileError(f"{archive.what} was written {advice}", kinds.TORCH_SAVE)
        if mmap:
            archive.verify()
        if map_location is None or map_location in ("cpu", torch.device("cpu")):
            mapped = descriptor if mmap else None
            found = _read_plain(archive, mapped, any_location=map_location is not None)
            if found is not None:
                return found
        if not mmap:
            archive.verify()
        return _left_to_torch(archive, descriptor, map_location, mmap=mmap)


def _archive_of(source: int | bytes, what: str, kind: str) -> Archive:
    if read_some(source, 0, 2) == b"PK":
        archive = Archive(source, what)
        if kinds.kind_of_members(archive.members) == kind:
            check_facts(archive)
            return archive
    raise kinds.wrong_kind(source, what, f"a {kind}")


_VERSION: Final = re.compile(rb"\s*\d{1,19}\s*")
# The content of the small members of an archive. Its readers trust these: they divide by the
# alignment, which ends the process if it is 0.
_FACTS: Final = {
    "byteorder": re.compile(b"little|big"),
    ".storage_alignment": re.compile(rb"[1-9]\d{0,9}\s*"),
    ".data/serialization_id": re.compile(rb"\d{1,100}"),
    **dict.fromkeys((".format_version", ".data/version", "version"), _VERSION),
}


def check_facts(archive: Archive) -> None:
    """Raise FileError if a small member, such as the version, has content that torch never writes."""
    for name in _FACTS.keys() & archive.members.keys():
        content = archive.read(name)
        if not _FACTS[name].fullmatch(content):
            raise archive.corrupt(f"{name} is {content[:40]!r}, which torch never writes")


class Checksums:
    """The checksums of the storages in a file, tested when a tensor is used."""

    def __init__(self, archive: Archive) -> None:
        self._archive, self._intact = archive, set[int]()
        members = archive.members.values() if archive.has_checksums else ()
        self._known = {(member.size, member.crc) for member in members}

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise FileError if the storage of a tensor is corrupt; each storage is read once."""
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        if not self._known or not size or address in self._intact:
            return
        # torch does not tell which member a storage was.
        if (size, zlib.crc32(_view(storage))) not in self._known:
            raise self._archive.corrupt(f"the content of {name!r} does not match its checksum")
        self._intact.add(address)


def read_mapped(path: str | os.PathLike[str]) -> tuple[Any, Checksums]:
    """Return the content of a file, mapped into memory with a verified pickle, and its checksums."""
    with open_regular(path) as descriptor, collector_paused():
        archive = _archive_of(descriptor, os.fspath(path), kinds.TORCH_SAVE)
        archive.verify(name for name in archive.members if not name.startswith("data/"))
        found = _read_plain(archive, descriptor, any_location=True)
        if found is None:
            found = _left_to_torch(archive, descriptor, "cpu", mmap=True)
        return found, Checksums(archive)


def verify_checksums(path: str | os.PathLike[str]) -> None:
    """Raise FileError if a file of torch is corrupt; files of formats without checksums pass."""
    with open_regular(path) as descriptor:
        if read_some(descriptor, 0, 2) in {b"", b"PK"}:
            Archive(descriptor, os.fspath(path)).verify()


def _left_to_torch(archive: Archive, descriptor: int, map_location: Any, *, mmap: bool) -> Any:
    """Load with torch, from the file that has been verified even if another one has replaced it."""
    what = f"{archive.what} cannot be read as a checkpoint"
    content = archive.read("data.pkl")
    if problem := pickle_problem(content, archive.members, trusted=allowed_by_user()):
        raise FileError(f"{what}: data.pkl: {problem}")
    order = archive.read("byteorder") if "byteorder" in archive.members else b""
    on_meta = isinstance(map_location, (str, torch.device)) and str(map_location)[:4] == "meta"
    if order not in {b"", sys.byteorder.encode()} and (on_meta or tensors_are_fake()):
        raise FileError(f"{what}: torch cannot swap the bytes of tensors without memory")
    names = extra_names(content)
    mapped = path_of(descriptor, archive.what) if mmap else None
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            if names:
                return load_with_names(file, map_location, names, mapped)
            return torch.load(mapped or file, map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        unsafe = re.findall(r"GLOBAL ([\w.]{1,200}) was not an allowed global", str(error))
        reason = "its pickle is invalid, or of a kind that weights_only=True does not read"
        if unsafe:
            reason = (
                f"it needs {unsafe[0]}, and loading that would execute code; none was executed. If you "
                f"trust the file, load it inside torch.serialization.safe_globals([{unsafe[0]}])"
            )
        raise UnsafeFileError(f"{what}: {reason}") from error
    except Exception as error:
        # Some messages of torch have a hundred lines.
        reason = str(error).partition("\n")[0][:500] or type(error).__name__
        raise FileError(f"{what}: {reason}") from error


_KINDS: Final = (
    *("BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat"),
    *("Double", "Float", "Half", "Int", "Long", "Short"),
)
_STORAGES: Final = {name: dtype for name in _KINDS if (dtype := storage_dtype(name))}
_NEWER: Final = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_LEAVES: Final = frozenset(
    {str, int, float, bool, type(None), Tensor, torch.nn.Parameter, torch.dtype, torch.Size}
)
# The instructions that torch.save writes, except those that contain the length of their argument. Memo
# places are below 2 ** 21: the unpickler allocates as many as a hostile file names. Tuples contain only
# numbers or are the arguments of a call: hashing nested tuples may take exponential time.
_NUMBER: Final = rb"(?:K.|M..|J....|G.{8}|[\x88\x89N])"
_INSTRUCTIONS: Final = re.compile(
    rb"(?:[hq].|r..[\x00-\x1f]\x00|j....|[)\]}RabesuQ]|[t\x85-\x87](?:q.|r..[\x00-\x1f]\x00)?[RQ]"
    rb"|\((?:%(n)s{1,99}t|(?![eut]))|%(n)s{3}\x87|%(n)s{2}\x86|%(n)s\x85|%(n)s"
    rb"|c[^\n]{0,99}\n[^\n]{0,99}\n){0,1000}" % {b"n": _NUMBER},
    re.DOTALL,
)
_VERSIONS: Final = {str(version).encode() for version in range(1, 11)}  # of the container


class _StorageType(NamedTuple):
    dtype: torch.dtype


class _Storage(NamedTuple):
    storage: torch.UntypedStorage
    dtype: torch.dtype
    numel: int


class _Unpickler(pickle.Unpickler):
    """The standard unpickler with an allow-list of names; UnpicklingError leaves the file to torch."""

    memo: Any

    def __init__(
        self, archive: Archive, allocate: Callable[[str], torch.UntypedStorage], any_location: bool
    ) -> None:
        super().__init__(io.BytesIO(archive.read("data.pkl")))
        self._archive, self._allocate, self._any_location = archive, allocate, any_location
        self._storages: dict[str, _Storage] = {}
        self.used: set[str] = {"data.pkl"}

    def find_class(self, module: str, name: str, /) -> Any:
        found = _NAMES[module, name]
        return partial(found, self) if found in _REBUILDS else found

    def persistent_load(self, pid: Any, /) -> _Storage:
        if type(pid) is not tuple or tuple(map(type, pid)) != _PID_TYPES:
            raise pickle.UnpicklingError
        tag, kind, key, location, numel = pid
        if tag != "storage" or (location != "cpu" and not self._any_location):
            raise pickle.UnpicklingError
        if found := self._storages.get(key):
            if found.dtype is not kind.dtype or found.numel != numel:
                raise pickle.UnpicklingError
            return found
        name, stated = f"data/{key}", numel * kind.dtype.itemsize
        member = self._archive.members.get(name)
        if member is None or member.size != stated:
            size = member.size if member else "no"
            raise self._archive.corrupt(f"{name!r} has {size} bytes, {stated} in the pickle")
        found = _Storage(self._allocate(name), kind.dtype, numel)
        self.used.add(name)
        # torch makes a new storage each time for those without memory.
        if numel:
            self._storages[key] = found
        return found

    def tensor(self, stored: Any, *description: Any) -> Tensor:
        return self.tensor_of_dtype(stored, *description[:5], stored.dtype, *description[5:])

    def tensor_of_dtype(self, stored: Any, *description: Any) -> Tensor:
        offset, size, stride, requires_grad, hooks, dtype, *metadata = description
        # The metadata are bits for lazy conjugation and negation.
        known = tuple(map(type, (stored, *description[:6]))) == _TENSOR_TYPES
        if not known or hooks or offset < 0 or metadata not in ([], [{}]):
            raise pickle.UnpicklingError
        last = offset
        for length, step in zip(size, stride, strict=True):
            if type(length) is not int or type(step) is not int or length < 0 or step < 0:
                raise pickle.UnpicklingError
            last += (length - 1) * step
        if 0 not in size and (last + 1) * dtype.itemsize > stored.storage.nbytes():
            raise self._archive.corrupt("a tensor extends beyond the end of its storage")
        tensor = torch.empty(0, dtype=dtype).set_(stored.storage, offset, size, stride)
        tensor.requires_grad = requires_grad
        tensor._backward_hooks = hooks
        return tensor

    def parameter(self, data: Tensor, requires_grad: bool, hooks: Any) -> torch.nn.Parameter:
        if type(data) is not Tensor or type(hooks) is not OrderedDict or hooks:
            raise pickle.UnpicklingError
        parameter = torch.nn.Parameter(data, requires_grad)
        parameter._backward_hooks = hooks
        return parameter


_PID_TYPES: Final = (str, _StorageType, str, str, int)
_TENSOR_TYPES: Final = (_Storage, int, tuple, tuple, bool, OrderedDict, torch.dtype)
_REBUILDS: Final = (_Unpickler.tensor, _Unpickler.tensor_of_dtype, _Unpickler.parameter)
_NAMES: Final[dict[tuple[str, str], Any]] = {
    **{("torch", f"{name}Storage"): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", str(dtype)[6:]): dtype for dtype in (*_STORAGES.values(), *_NEWER)},
    ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _Unpickler.tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _Unpickler.tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _Unpickler.parameter,
    ("collections", "OrderedDict"): OrderedDict,
}


def _read_plain(archive: Archive, mapped: int | None, *, any_location: bool) -> Any:
    """Return the content of a plain state dict, or None to let torch read the file.

    Tensors are mapped from a descriptor, unverified, or read and verified with all other members.
    """
    known = _is_as_torch_writes(archive) and _has_known_instructions(archive.read("data.pkl"))
    if modes_are_active() or not known:
        return None
    mapping = None if mapped is None else memory_map.mmap(mapped, 0, access=memory_map.ACCESS_COPY)
    large: dict[str, memoryview | None] = {}

    def allocate(name: str) -> torch.UntypedStorage:
        member = archive.members[name]
        if mapping is not None and member.size:
            start = archive.start_of(member)
            if start % 16:
                raise pickle.UnpicklingError
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=member.size, offset=start)
            return flat.untyped_storage()
        storage = torch.UntypedStorage(member.size)
        if archive.is_large(name):
            large[name] = _view(storage)
        else:
            _view(storage)[:] = archive.read(name)
        return storage

    unpickler = _Unpickler(archive, allocate, any_location)
    try:
        found = unpickler.load()
    except FileError:
        raise
    except Exception:  # noqa: BLE001 - torch reads the file, or raises its own error
        return None
    finally:
        # The memo references the unpickler, and so all tensors.
        unpickler.memo.clear()
    if not _is_plain(found, set()):
        return None
    archive.read_all(large)
    if mapped is None:
        archive.verify(archive.members.keys() - unpickler.used)
    return found


def _view(storage: torch.UntypedStorage) -> memoryview:
    if not (size := storage.nbytes()):
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B")


def _is_as_torch_writes(archive: Archive) -> bool:
    first = ("byteorder", ".data/version", "version")
    order, *versions = (archive.read(n) if n in archive.members else None for n in first)
    if order is None and torch.serialization.get_default_load_endianness() is None:
        order = b"little"
    version = next((each.strip() for each in versions if each is not None), b"")
    return version in _VERSIONS and order == sys.byteorder.encode()


def _has_known_instructions(content: bytes) -> bool:
    if not content.startswith(b"\x80\x02"):
        return False
    at, end = 2, len(content) - 1
    while at < end:
        before = at
        if content[at] == 0x58:  # a string, after its length
            at += 5 + int.from_bytes(content[at + 1 : at + 5], "little")
        elif content[at] == 0x8A:  # a long integer, after its length
            at += 2 + content[at + 1]
        run = _INSTRUCTIONS.match(content, at, end)
        at = run.end() if run else at
        if at == before:
            return False
    return at == end and content[end] == 0x2E


def _is_plain(found: Any, seen: set[int], depth: int = 0) -> bool:
    """Return True if there are only tensors, numbers and strings in dicts, lists and tuples."""
    kind, inner = type(found), found
    if kind in _LEAVES or id(found) in seen:
        return True
    seen.add(id(found))
    if kind is dict or kind is OrderedDict:
        attributes = vars(found).values() if kind is OrderedDict else ()
        inner = [*dict.keys(found), *dict.values(found), *attributes]
    elif kind is not list and kind is not tuple:
        return False
    # Deeper nesting is left to pickle_problem.
    return depth < 100 and all(_is_plain(each, seen, depth + 1) for each in inner)


# The pickles that jit.load reads, with the folders of their tensors.
_PICKLES: Final = {"data.pkl": "data/", "constants.pkl": "constants/"}
_SHAPES: Final = "traced_inputs.pkl"
_LINES: Final = ".debug_pkl"
_READER: Final = re.compile("PytorchStreamReader|inline_container")


class VerifiedArchive(NamedTuple):
    """The path or bytes for torch's reader, and name and size in bytes of each extra file.

    A flatbuffer does not list its extra files: None.
    """

    source: str | bytes
    extra_files: dict[str, int] | None


@contextmanager
def verified_archive(f: Any, sha256: str | None = None) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, and hold the file open for the block that loads it."""
    with ExitStack() as stack:
        content: int | bytes
        if isinstance(f, (str, os.PathLike)):
            what = os.fsdecode(f)
            # The messages of torch.jit.load.
            if not Path(what).exists():
                raise ValueError(f"The provided filename {what} does not exist")
            if Path(what).is_dir():
                raise ValueError(f"The provided filename {what} is a directory")
            content = stack.enter_context(open_regular(what))
            source: str | bytes = path_of(content, what)
        else:
            what = f"the file {getattr(f, 'name', '')}".rstrip()
            content = source = f.read()
            # The position of a file that was just written is its end.
            if not content and hasattr(f, "seekable") and f.seekable() and f.tell():
                f.seek(0)
                content = source = f.read()
            if not isinstance(content, bytes):
                raise TypeError("the file is open as text; open it in the mode 'rb'")
        kinds.check_digest(content, what, sha256)
        if kinds.kind_of(content) == kinds.FLATBUFFER:
            # It has no checksums. From a path, torch maps it into memory that is read-only: writing to
            # a weight, or to the statistics of a batch normalization, ends the process.
            if isinstance(source, str):
                source = Path(source).read_bytes()
            yield VerifiedArchive(source, None)
            return
        archive = _archive_of(content, what, kinds.TORCHSCRIPT)
        known = {*archive.members, "version" if ".data/version" in archive.members else ""}
        if absent := [name for name in (*_PICKLES, "version") if name not in known]:
            raise archive.corrupt(f"it has no {', '.join(absent)}")
        _check_pickles(archive)
        archive.verify()
        extra = {n[6:]: m.size for n, m in archive.members.items() if n.startswith("extra/")}
        try:
            yield VerifiedArchive(source, extra)
        except (RuntimeError, IndexError) as error:
            # An IndexError comes from torch's reader of pickles.
            if isinstance(error, RuntimeError) and not _READER.search(str(error)):
                raise
            reason = str(error).partition("\n")[0]
            raise archive.corrupt(f"torch cannot read it: {reason}") from error


def _check_pickles(archive: Archive) -> None:
    """Check all pickles that jit.load reads: also inputs of a trace, and line numbers for errors."""
    for name in archive.members:
        if name in _PICKLES or name == _SHAPES or name.endswith(_LINES):
            # Tensors of the inputs are written without their content.
            stored = archive.members if name in _PICKLES else {}
            folder = _PICKLES.get(name, "")
            if problem := pickle_problem(archive.read(name), stored, folder, script=True):
                raise archive.corrupt(f"{name}: {problem}")


publish("modkit", load_checkpoint, save_checkpoint)
