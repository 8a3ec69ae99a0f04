"""Checkpoints of ``torch.save``: written atomically, read with all checksums verified.

Plain state dicts are read by a fast path: the standard unpickler with an allow-list of names, and memory
that is read once and checked on the way. Anything else is left to ``torch.load(weights_only=True)``, after
the same check. Neither executes code from the file.
"""

import argparse
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
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from modkit._namespace import publish
from modkit._upstream import modes_are_active, tensors_are_fake
from modkit.errors import FileError
from modkit.files.atomic_write import atomic_write
from modkit.files.kinds import (
    LEGACY,
    TORCH_SAVE,
    TORCHSCRIPT,
    check_digest,
    kind_of,
    kind_of_members,
    parse_digest,
    wrong_kind,
)
from modkit.files.pickle_limits import DEEPEST, collector_paused, legacy_problem, pickle_problem
from modkit.files.zip_archive import MOST_TEXT, Archive, is_zip, open_regular, path_of, read_some


__all__ = ["load_checkpoint", "save_checkpoint"]


class UnsafeFileError(FileError):
    """A pickle is more than plain data."""


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as ``torch.save`` does, but atomically.

    The file appears complete under its name, flushed to the disk, or what was there before stays: after
    a killed process, a full disk, or an error. It has checksums, whatever
    ``torch.serialization.set_crc32_options`` says.

    Args:
        checkpoint: State dicts, numbers and text under names of your choice.
        path: The file; its folder must exist. A symbolic link is followed.

    Raises:
        OSError: If the file cannot be written, with ``errno`` and the path.

    Example:
        >>> from modkit import EMA, load_checkpoint, nn, save_checkpoint
        >>> model = nn.Linear(2, 1)
        >>> ema = EMA(model)
        >>> path = tmp_path / "last.pt"
        >>> save_checkpoint({"model": model.state_dict(), "ema": ema.state_dict()}, path)
        >>> sorted(load_checkpoint(path))
        ['ema', 'model']
    """
    with atomic_write(path) as unfinished, _CHECKSUMS:
        torch.save(checkpoint, unfinished)


class _Checksums:
    """A block in which torch writes checksums, whatever is set; blocks in several threads may overlap."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.serialization.get_crc32_options()
                torch.serialization.set_crc32_options(True)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.serialization.set_crc32_options(self._before)


_CHECKSUMS: Final = _Checksums()


def load_checkpoint(
    path: str | os.PathLike[str],
    map_location: Any = None,
    *,
    mmap: bool = False,
) -> Any:
    """Read a file of ``torch.save`` after verifying every checksum in it.

    Returns what ``torch.load(path, map_location, weights_only=True)`` returns, in less time. That does
    not look at checksums: a flipped bit becomes another weight in silence.

    Args:
        path: The file.
        map_location: Where the tensors go, as in ``torch.load``.
        mmap: Map the file into memory instead of reading the tensors. The file must not be changed in
            place while they are in use; replacing it, as ``save_checkpoint`` does, is safe.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If it is corrupt, was written without checksums, or cannot be loaded with
            ``weights_only=True``.
    """
    with open_regular(path) as descriptor, collector_paused():
        archive = _torch_archive(descriptor, path)
        if not archive.has_checksums:
            raise FileError(
                f"{os.fspath(path)} was written without checksums; torch.load(path, weights_only=True) "
                "reads it unverified",
                "torch.save file",
            )
        if _is_for_cpu(map_location):
            found = _read_plain(
                archive, descriptor, any_location=map_location is not None, mmap=mmap
            )
            if found is not None:
                return found[0]
        archive.verify()
        _check_for_torch(archive, map_location)
        return _left_to_torch(descriptor, path, map_location, mmap=mmap)


def _archive_of(source: int | bytes, what: str, kind: str, wanted: str) -> Archive:
    """Return the archive of one kind; raise FileError for a file of another kind."""
    if read_some(source, 0, 2) == b"PK":
        archive = Archive(source, what)
        if kind_of_members(archive.members) == kind:
            return archive
    raise wrong_kind(source, what, wanted)


def _torch_archive(descriptor: int, path: str | os.PathLike[str]) -> Archive:
    wanted = "a torch.save file with checksums"
    return _archive_of(descriptor, os.fspath(path), TORCH_SAVE, wanted)


def _is_for_cpu(map_location: object) -> bool:
    if modes_are_active():
        return False
    return map_location is None or map_location == "cpu" or map_location == torch.device("cpu")


# What is mapped and verified tensor by tensor, for readers that do not need all of a file.


class Checksums:
    """The checksums of the storages in a file, compared when a tensor is used."""

    def __init__(self, archive: Archive | None) -> None:
        self._archive = archive
        members = archive.members.values() if archive is not None and archive.has_checksums else ()
        self._known = {(member.size, member.crc) for member in members}
        self._intact: set[int] = set()

    def check(self, name: str, tensor: Tensor) -> None:
        """Compare the storage of a tensor with the checksums, once.

        It must have one of those in the file: which of them is not known of storages that torch has read.

        Raises:
            FileError: If its bytes are not those that were written.
        """
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        if not self._known or not size or address in self._intact:
            return
        assert self._archive is not None
        if (size, zlib.crc32(_view(storage))) not in self._known:
            raise self._archive.corrupt(f"the content of {name!r} does not match its checksum")
        self._intact.add(address)


def read_mapped(path: str | os.PathLike[str]) -> tuple[Any, Checksums]:
    """Return what a file of torch holds, mapped into memory, and the checksums of its tensors.

    Files from before torch 1.6 are read into memory, and have no checksums.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If it is corrupt, apart from the tensors, or cannot be loaded with ``weights_only=True``.
    """
    with open_regular(path) as descriptor, collector_paused():
        if read_some(descriptor, 0, 2) != b"PK" and kind_of(descriptor) == LEGACY:
            if problem := legacy_problem(read_some(descriptor, 0, MOST_TEXT)):
                raise FileError(f"{os.fspath(path)} is corrupt: {problem}", LEGACY)
            return _left_to_torch(descriptor, path, "cpu", mmap=False, options=True), Checksums(
                None
            )
        archive = _torch_archive(descriptor, path)
        archive.verify(name for name in archive.members if not name.startswith("data/"))
        if not modes_are_active():
            found = _read_plain(archive, descriptor, any_location=True, mmap=True, verify=False)
            if found is not None:
                return found[0], Checksums(archive)
        _check_for_torch(archive, "cpu")
        return _left_to_torch(descriptor, path, "cpu", mmap=True, options=True), Checksums(archive)


def verify_checksums(path: str | os.PathLike[str]) -> None:
    """Verify the checksums of a file of torch, if it has any; files of other formats pass.

    Raises:
        FileError: If the file is corrupt.
    """
    with open_regular(path) as descriptor:
        if is_zip(descriptor):
            Archive(descriptor, os.fspath(path)).verify()


def _check_for_torch(archive: Archive, map_location: object) -> None:
    """Refuse what torch.load would not survive, or would read from other places of the file."""
    if problem := pickle_problem(archive.read("data.pkl"), archive.members):
        raise FileError(f"{archive.what} cannot be read as a checkpoint: data.pkl: {problem}")
    order = archive.read("byteorder") if "byteorder" in archive.members else b""
    on_meta = isinstance(map_location, (str, torch.device)) and str(map_location)[:4] == "meta"
    if order not in {b"", sys.byteorder.encode()} and (on_meta or tensors_are_fake()):
        raise FileError(
            f"{archive.what} cannot be read as a checkpoint: its byte order is not that of this machine, "
            "and torch cannot reverse the bytes of tensors without memory"
        )


def _left_to_torch(
    descriptor: int,
    path: str | os.PathLike[str],
    map_location: Any,
    *,
    mmap: bool,
    options: bool = False,
) -> Any:
    """Load with torch, from the file that has been verified and not from one that has replaced it."""
    try:
        with (
            _plain_classes() if options else nullcontext(),
            os.fdopen(os.dup(descriptor), "rb") as file,
        ):
            file.seek(0)
            source = path_of(descriptor, path) if mmap else file
            return torch.load(source, map_location, weights_only=True, mmap=mmap)
    except Exception as error:
        unsafe, reason = _reason(descriptor, error)
        kind = UnsafeFileError if unsafe else FileError
        raise kind(f"{os.fspath(path)} cannot be read as a checkpoint: {reason}") from error


def _plain_classes() -> Any:
    """Allow the class in which training scripts, those of timm for instance, keep their options."""
    # Leaving the block would take away what the user has allowed.
    if argparse.Namespace in torch.serialization.get_safe_globals():
        return nullcontext()
    return torch.serialization.safe_globals([argparse.Namespace])


def _reason(descriptor: int, error: Exception) -> tuple[bool, str]:
    """Name the classes that torch refuses, in place of its advice to execute them."""
    if not isinstance(error, pickle.UnpicklingError):
        # Some texts of torch have a hundred lines.
        return False, str(error).partition("\n")[0][:500] or type(error).__name__
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # noqa: BLE001 - the format is old or the pickle is bad
        unsafe = set(re.findall(r"GLOBAL ([\w.]{1,200}) was not an allowed global", str(error)))
    if names := sorted(unsafe - {"argparse.Namespace"})[:10]:
        shown = ", ".join(name[:200] for name in names)
        return True, f"it needs {shown}, and loading these would execute code; none was executed"
    return True, "its pickle is invalid, or of a kind that weights_only=True does not read"


# The fast path.

_STORAGES: Final = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_NEWER: Final = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_LEAVES: Final = frozenset(
    {str, int, float, bool, type(None), Tensor, torch.nn.Parameter, torch.dtype, torch.Size}
)
# The instructions that torch.save writes, without those whose argument has a length of its own. Places
# in the memo are below 2 ** 21, or the unpickler would allocate as much as a hostile file asks for.
# Tuples hold numbers only, or are the arguments of a call at once: tuples that hold one another may take
# exponential time to hash.
_NUMBER: Final = rb"(?:K.|M..|J....|G.{8}|[\x88\x89N])"
_INSTRUCTIONS: Final = re.compile(
    rb"(?:[hq].|r..[\x00-\x1f]\x00|j....|[)\]}RabesuQ]|[t\x85-\x87](?:q.|r..[\x00-\x1f]\x00)?[RQ]"
    rb"|\((?:%(n)s{1,99}t|(?![eut]))|%(n)s{3}\x87|%(n)s{2}\x86|%(n)s\x85|%(n)s"
    rb"|c[^\n]{0,99}\n[^\n]{0,99}\n){0,1000}" % {b"n": _NUMBER},
    re.DOTALL,
)
# The version of the container that this reader knows.
_VERSIONS: Final = {str(version).encode() for version in range(1, 11)}


class _NotPlainError(Exception):
    """Something is not what torch.save writes for a plain state dict; torch decides about it."""


class _StorageType:
    """Stands for a class of storages in the pickle."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Storage(NamedTuple):
    """A storage, and what the pickle says about it."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    numel: int
    nbytes: int


class _Unpickler(pickle.Unpickler):
    """The standard unpickler, for a handful of names.

    Args:
        archive: The file.
        allocate: Makes the storage of a member.
        any_location: True if tensors from other devices go to the CPU.
    """

    memo: Any

    def __init__(
        self,
        archive: Archive,
        allocate: Callable[[str], torch.UntypedStorage],
        *,
        any_location: bool,
    ) -> None:
        self._content = archive.read("data.pkl")
        super().__init__(io.BytesIO(self._content))
        self._archive, self._allocate, self._any_location = archive, allocate, any_location
        self._storages: dict[str, _Storage] = {}
        self.used: set[str] = {"data.pkl"}

    def load(self) -> Any:
        """Return what the file holds, if it is nothing but a plain state dict."""
        if not _has_known_instructions(self._content):
            raise _NotPlainError
        try:
            found = super().load()
        finally:
            # It holds functions that hold the unpickler, and so all tensors.
            self.memo.clear()
        if not _is_plain(found):
            raise _NotPlainError
        return found

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what a name stands for."""
        found = _NAMES.get((module, name))
        if found is None:
            raise _NotPlainError
        return partial(found, self) if found in _REBUILDS else found

    def persistent_load(self, pid: Any, /) -> _Storage:
        """Return the storage that a tensor refers to."""
        if type(pid) is not tuple or len(pid) != 5:
            raise _NotPlainError
        tag, kind, key, location, numel = pid
        strings = type(tag) is str and type(key) is str and type(location) is str
        if not strings or type(kind) is not _StorageType or type(numel) is not int:
            raise _NotPlainError
        if tag != "storage" or (location != "cpu" and not self._any_location):
            raise _NotPlainError
        found = self._storages.get(key)
        if found is not None:
            if found.dtype is not kind.dtype or found.numel != numel:
                raise _NotPlainError
            return found
        name = f"data/{key}"
        member = self._archive.members.get(name)
        if member is None or member.size != numel * kind.dtype.itemsize:
            stated = f"{numel * kind.dtype.itemsize} bytes in the pickle"
            raise self._archive.corrupt(
                f"{name!r} has {member.size if member else 'no'} bytes, and {stated}"
            )
        found = _Storage(self._allocate(name), kind.dtype, numel, member.size)
        self.used.add(name)
        # torch makes a new one each time for storages without memory.
        if numel:
            self._storages[key] = found
        return found

    def tensor(self, stored: Any, *description: Any) -> Tensor:
        """Rebuild a tensor of the dtype of its storage, as ``torch._utils._rebuild_tensor_v2``."""
        return self._rebuilt(stored, stored.dtype, description[:5], description[5:])

    def tensor_of_dtype(self, stored: Any, *description: Any) -> Tensor:
        """Rebuild a tensor that names its dtype, as ``torch._utils._rebuild_tensor_v3``."""
        return self._rebuilt(stored, description[5], description[:5], description[6:])

    def _rebuilt(self, stored: Any, dtype: Any, description: Any, metadata: Any) -> Tensor:
        offset, size, stride, requires_grad, hooks = description
        types = (type(stored), type(dtype), type(offset), type(size), type(stride), type(hooks))
        if types != _TENSOR_TYPES or type(requires_grad) is not bool or hooks or offset < 0:
            raise _NotPlainError
        # Bits for lazy conjugation and negation.
        if metadata and (len(metadata) > 1 or type(metadata[0]) is not dict or metadata[0]):
            raise _NotPlainError
        last, empty = offset, False
        for length, step in zip(size, stride, strict=True):
            if type(length) is not int or type(step) is not int or length < 0 or step < 0:
                raise _NotPlainError
            last += (length - 1) * step
            empty = empty or not length
        if not empty and (last + 1) * dtype.itemsize > stored.nbytes:
            raise self._archive.corrupt("a tensor reaches beyond the end of its storage")
        tensor = torch.empty(0, dtype=dtype).set_(stored.storage, offset, size, stride)
        if requires_grad:
            tensor.requires_grad = True
        tensor._backward_hooks = hooks
        return tensor

    def parameter(self, data: Tensor, requires_grad: bool, hooks: Any) -> torch.nn.Parameter:
        """Rebuild a parameter as torch does."""
        if type(data) is not Tensor or type(hooks) is not OrderedDict or hooks:
            raise _NotPlainError
        parameter = torch.nn.Parameter(data, requires_grad)
        parameter._backward_hooks = hooks
        return parameter


_TENSOR_TYPES: Final = (_Storage, torch.dtype, int, tuple, tuple, OrderedDict)
_REBUILDS: Final = (_Unpickler.tensor, _Unpickler.tensor_of_dtype, _Unpickler.parameter)
_NAMES: Final[dict[tuple[str, str], Any]] = {
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", str(dtype)[6:]): dtype for dtype in (*_STORAGES.values(), *_NEWER)},
    ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _Unpickler.tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _Unpickler.tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _Unpickler.parameter,
    ("collections", "OrderedDict"): OrderedDict,
}


def _read_plain(
    archive: Archive, descriptor: int, *, any_location: bool, mmap: bool, verify: bool = True
) -> tuple[Any] | None:
    """Return the content of a plain state dict, or None where torch has to decide.

    Raises:
        FileError: If a checksum is wrong, or a tensor is not within its storage.
    """
    mapping = memory_map.mmap(descriptor, 0, access=memory_map.ACCESS_COPY) if mmap else None
    large: dict[str, memoryview | None] = {}

    def allocate(name: str) -> torch.UntypedStorage:
        member = archive.members[name]
        if mapping is not None and member.size:
            start = archive.start_of(member)
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=member.size, offset=start)
            storage, target = flat.untyped_storage(), None
            if start % 16:
                raise _NotPlainError
        else:
            storage = torch.UntypedStorage(member.size)
            target = _view(storage)
        if archive.is_large(name):
            if verify:
                large[name] = target
        elif target is not None:
            target[:] = archive.read(name)
        elif verify:
            archive.read(name)
        return storage

    if not _is_as_torch_writes(archive):
        return None
    unpickler = _Unpickler(archive, allocate, any_location=any_location)
    try:
        found = unpickler.load()
    except FileError:
        raise
    except Exception:  # noqa: BLE001 - whatever is wrong here, torch says it in its own words
        return None
    archive.read_all(large)
    if verify:
        archive.verify(archive.members.keys() - unpickler.used)
    return (found,)


def _view(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a storage."""
    size = storage.nbytes()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B")


def _is_as_torch_writes(archive: Archive) -> bool:
    order = sys.byteorder.encode()
    if "byteorder" in archive.members:
        known = archive.read("byteorder") == order
    else:
        known = order == b"little" and torch.serialization.get_default_load_endianness() is None
    if ".storage_alignment" in archive.members:
        known = known and archive.read(".storage_alignment").isdigit()
    version = next((n for n in (".data/version", "version") if n in archive.members), None)
    return known and version is not None and archive.read(version).strip() in _VERSIONS


def _has_known_instructions(content: bytes) -> bool:
    """Return True if a pickle has no other instructions than torch.save writes."""
    if not content.startswith(b"\x80\x02"):
        return False
    at, end = 2, len(content) - 1
    while at < end:
        before = at
        if content[at] == 0x58:  # text, with its length
            at += 5 + int.from_bytes(content[at + 1 : at + 5], "little")
        elif content[at] == 0x8A:  # a long integer, likewise
            at += 2 + content[at + 1]
        run = _INSTRUCTIONS.match(content, at, end)
        at = run.end() if run else at
        if at == before:
            return False
    return at == end and content[end] == 0x2E


def _is_plain(found: Any) -> bool:
    """Return True if there is nothing but tensors, numbers and text in dicts, lists and tuples."""
    level: list[Any] = [found]
    seen: set[int] = set()
    # What nests deeper is left to the function that follows the pickle.
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _LEAVES or id(value) in seen:
                continue
            seen.add(id(value))
            if kind is dict or kind is OrderedDict:
                inner.extend(dict.keys(value))
                inner.extend(dict.values(value))
                if kind is OrderedDict:
                    inner.extend(vars(value).values())
            elif kind is list or kind is tuple:
                inner.extend(value)
            else:
                return False
        if not inner:
            return True
        level = inner
    return False


# TorchScript archives.

_EXTRA: Final = "extra/"
_PICKLES: Final = ("data.pkl", "constants.pkl")
_READER: Final = re.compile("PytorchStreamReader|inline_container")


@dataclass(frozen=True)
class VerifiedArchive:
    """What torch may load.

    Attributes:
        source: The path or the bytes to give to torch's reader.
        extra_files: Name and size in bytes of each extra file.
    """

    source: str | bytes
    extra_files: dict[str, int]


@contextmanager
def verified_archive(f: Any, sha256: str | None = None) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, and hold the file open for the block that loads it.

    Args:
        f: A path, or a file that is open for reading.
        sha256: Expected digest of the file, 64 hexadecimal digits, after ``sha256:`` or alone.

    Raises:
        ValueError: If there is no such file, or ``sha256`` is not a digest.
        FileError: If the file is corrupt, not a TorchScript archive, or has another digest.
    """
    if sha256 is not None:
        parse_digest(sha256)
    with ExitStack() as stack:
        content: int | bytes
        if isinstance(f, (str, os.PathLike)):
            what = os.fsdecode(f)
            _check_path(what)
            content = stack.enter_context(open_regular(what))
            source: str | bytes = path_of(content, what)
        else:
            what = f"the file {getattr(f, 'name', '')}".rstrip()
            content = source = _content_of(f)
        if sha256 is not None:
            check_digest(content, what, sha256)
        archive = _archive_of(content, what, TORCHSCRIPT, "a TorchScript archive")
        _check_pickles(archive)
        archive.verify()
        extra = {n: m.size for n, m in archive.members.items() if n.startswith(_EXTRA)}
        try:
            yield VerifiedArchive(source, {n.removeprefix(_EXTRA): extra[n] for n in extra})
        except (RuntimeError, IndexError) as error:
            # Texts of torch's reader of zip files have one of these names in them. An index that is out of
            # range comes from its reader of pickles.
            if isinstance(error, RuntimeError) and not _READER.search(str(error)):
                raise
            raise archive.corrupt(
                f"torch cannot read it: {str(error).partition(chr(10))[0]}"
            ) from error


def _check_path(path: str) -> None:
    # The texts are those of torch.jit.load, and show the path as it was given.
    if not Path(path).exists():
        raise ValueError(f"The provided filename {path} does not exist")
    if Path(path).is_dir():
        raise ValueError(f"The provided filename {path} is a directory")


def _content_of(f: Any) -> bytes:
    """Read an open file; one that has just been written stands at its end, and is read from the start."""
    content: Any = f.read()
    if not content and hasattr(f, "seekable") and f.seekable() and f.tell():
        f.seek(0)
        content = f.read()
    if not isinstance(content, bytes):
        raise TypeError("the file is open as text; open it in the mode 'rb'")
    return content


def _check_pickles(archive: Archive) -> None:
    missing = [name for name in _PICKLES if name not in archive.members]
    if not {"version", ".data/version"} & archive.members.keys():
        missing.append("version")
    if missing:
        raise archive.corrupt(f"it has no {', '.join(missing)}")
    for name in _PICKLES:
        folder = name.removesuffix(".pkl") + "/"
        content, members = archive.read(name), archive.members
        if problem := pickle_problem(content, members, folder, script=True):
            raise archive.corrupt(f"{name}: {problem}")


publish("modkit", load_checkpoint, save_checkpoint)
