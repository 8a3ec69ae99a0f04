"""Checkpoints of ``torch.save``: written atomically, read with verified checksums.

A fast path reads plain state dicts, with an allow-list of names, and verifies memory as it is read.
Other files are verified, then read by ``torch.load(weights_only=True)``. Neither executes code from
the file.
"""

import errno
import io
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from modkit._messages import add_note
from modkit._namespace import publish
from modkit._upstream import (
    allowed_by_user,
    is_meta,
    load_with_names,
    modes_are_active,
    never_compiled,
    sparse_tensors_to_check,
    tensors_are_fake,
)
from modkit.errors import FileError
from modkit.files import kinds
from modkit.files.atomic_write import IN_USE, atomic_write
from modkit.files.checkpoint_values import checked_pickle, extra_names
from modkit.files.kinds import archive_of
from modkit.files.operating_system import PATH_TYPES, AnyPath, path_of
from modkit.files.pickle_limits import collector_paused, pickle_problem
from modkit.files.plain_unpickler import PlainUnpickler, is_for_plain_unpickler, is_plain
from modkit.files.storages import Storages, memory_of
from modkit.files.zip_archive import Archive, crc32, open_regular, open_source, read_some


__all__ = ["load_checkpoint", "save_checkpoint"]

_LOCK: Final = threading.Lock()
_CRC_OPTIONS: Final[list[bool]] = []
# Errors of a file that may be written to, but not replaced.
_NOT_REPLACED: Final = {errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS}
_IN_PLACE: Final = (
    "The file is writable: save_checkpoint(..., atomic=False) writes into it, not atomically."
)


class UnsafeFileError(FileError):
    """A pickle is more than plain data."""


@never_compiled
def save_checkpoint(
    checkpoint: Mapping[str, Any], path: AnyPath | IO[bytes], *, atomic: bool = True
) -> None:
    """Write a checkpoint as ``torch.save`` does, but atomically and always with checksums.

    After a killed process, a full disk or an error, ``path`` is the previous file or the complete
    new one. It has checksums, whatever ``torch.serialization.set_crc32_options`` says.

    Args:
        checkpoint: Dicts, lists, tuples and sets of tensors, numbers, strings and bytes, with
            numbers and small arrays of NumPy, random states and ``argparse.Namespace``.
        path: The file; its folder must exist. A symbolic link is followed. An open file is written
            to at its position, as with ``atomic=False``.
        atomic: If False, write into the existing file instead of replacing it: for a file that is
            mounted by itself, or in a folder that is not writable. The checkpoint is made in memory
            first, so an invalid one changes nothing. A full disk or a killed process leaves a file
            that ``load_checkpoint`` refuses, and readers may see a part of it. Tensors that are
            mapped from the file change or, if it gets shorter, end the process.

    Raises:
        TypeError: If ``load_checkpoint`` would refuse an entry, for instance a path or a module.
            The text says where it is, and what to save instead. Nothing is written. Also for a file
            that is open as text.
        ValueError: If the checkpoint has more than 128 MB without its tensors.
        OSError: If the file cannot be written, with ``errno`` and the path. A note says if
            ``atomic=False`` would help.
        AttributeError: If ``path`` is neither a path nor a file.

    Example:
        >>> from modkit import load_checkpoint, nn, save_checkpoint
        >>> path = tmp_path / "last.pt"
        >>> save_checkpoint({"model": nn.Linear(2, 1).state_dict(), "epoch": 3}, path)
        >>> load_checkpoint(path)["epoch"]
        3
    """
    if not atomic or not isinstance(path, PATH_TYPES):
        _write_in_place(checkpoint, path)
        return

    try:
        write_checkpoint(checkpoint, path, checked_pickle())
    except OSError as error:
        file = Path(os.fsdecode(path))
        # Writing into a file that is mapped would change tensors, so it is not advised.
        may_help = error.errno in _NOT_REPLACED and IN_USE not in str(error)
        if may_help and file.is_file() and os.access(file, os.W_OK):
            add_note(error, _IN_PLACE)
        raise


def write_checkpoint(content: object, path: AnyPath, pickle_module: Any = pickle) -> None:
    """Write any object as ``torch.save`` does, but atomically and always with checksums.

    Args:
        content: What ``torch.save`` can write.
        path: The file; its folder must exist.
        pickle_module: That of ``torch.save``.

    Raises:
        OSError: If the file cannot be written, with ``errno`` and the path.
    """
    with atomic_write(path) as unfinished, checksums_on():
        torch.save(content, unfinished, pickle_module=pickle_module)


def _write_in_place(content: object, target: Any) -> None:
    """Write into an open file, or into a path as it is, once the content is complete."""
    path = Path(os.fsdecode(target)) if isinstance(target, PATH_TYPES) else None
    buffer = io.BytesIO()
    # For an object that is neither, torch raises its error.
    place: Any = buffer if path or callable(getattr(target, "write", None)) else target
    with checksums_on():
        torch.save(content, place, pickle_module=checked_pickle())

    opened: Any = path.open("wb", buffering=0) if path else nullcontext(target)
    try:
        # The traceback of an error keeps the view, and the buffer could not be closed before it.
        with buffer.getbuffer() as unwritten, opened as file:
            done = 0
            # A file without a buffer may take less than all of it.
            while done < len(unwritten):
                done += file.write(unwritten[done:]) or len(unwritten)
            file.flush()
            if path and path.is_file():
                os.fsync(file.fileno())
    except OSError as error:
        if path and error.filename is None:
            error.filename = str(path)
        raise


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


@never_compiled
def load_checkpoint(
    path: AnyPath | IO[bytes], map_location: Any = None, *, mmap: bool = False
) -> Any:
    """Read a file of ``torch.save`` after verifying its checksums.

    ``torch.load`` ignores the checksums: a flipped bit in the file silently becomes another weight
    (https://github.com/pytorch/pytorch/issues/126952). Plain state dicts are verified while they
    are read: many small tensors are faster than with ``torch.load``, large ones take about the same
    time if the package zlib-ng is installed. Other files are verified, and then read by torch.

    Args:
        path: The file, or one that is open for reading, which is read into memory from its position
            on.
        map_location: Device of the tensors, a dict of devices, or a function, as in ``torch.load``.
            A function receives verified storages. With ``"meta"``, the content of tensors is
            neither read nor verified; everything else is.
        mmap: Map the file into memory instead of reading the tensors. It must not be changed in
            place while they are in use; replacing it, as ``save_checkpoint`` does, is safe, or
            refused (Windows).

    Returns:
        What ``torch.load(path, map_location, weights_only=True)`` returns. No code from the file is
        executed.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If it is corrupt, has no checksums, is of another kind, or cannot be loaded with
            ``weights_only=True``.
        RuntimeError: If ``map_location`` names a device that is not available, as ``torch.load``
            raises. What a function raises is passed on.
        ValueError: If ``mmap`` is True for an open file.
        TypeError: If a file is open as text.
        AttributeError: If ``path`` is neither a path nor a file.

    Example:
        >>> import torch
        >>> from modkit import load_checkpoint
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"weight": torch.ones(2, 3)}, path)
        >>> load_checkpoint(path, map_location="cpu")["weight"].shape
        torch.Size([2, 3])
    """
    if not isinstance(path, PATH_TYPES):
        if mmap:
            raise ValueError("f must be a file path in order to use the mmap argument")
        if not hasattr(path, "read"):
            torch.load(path, weights_only=True)  # raises torch's error

    with open_source(path) as (source, what), collector_paused():
        archive = archive_of(source, what, kinds.TORCH_SAVE)
        if not archive.has_checksums:
            raise FileError(
                f"{archive.what} was written without checksums; "
                "torch.load(path, weights_only=True) reads it unverified",
                kinds.TORCH_SAVE,
            )
        checked = set(archive.members)
        if is_meta(map_location):
            # The content of tensors is not read.
            checked = {name for name in checked if not name.startswith("data/")}

        # Kept for the unpickler, so that verifying does not read it as well.
        archive.text("data.pkl")
        if mmap:
            archive.verify(checked)
        mapped = source if mmap and isinstance(source, int) else None
        content = _read_plain(archive, mapped, map_location)
        # Members that have not been read yet, such as tensors that the pickle does not name.
        archive.verify(checked)
        if content is not None:
            return content
        return _left_to_torch(archive, source, map_location, mmap=mmap)


class Checksums:
    """The checksums of the storages in a file, tested when a tensor is used.

    Args:
        archive: The file; without checksums, nothing is tested.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        # The addresses of storages that have been tested.
        self._intact = set[int]()
        members = archive.members.values() if archive.has_checksums else ()
        self._expected = {(member.size, member.crc) for member in members}

    def check(self, name: str, tensor: Tensor) -> None:
        """Test the storage of a tensor; each storage is read once.

        Args:
            name: The name of the tensor, for the error.
            tensor: A tensor from the file, on the CPU.

        Raises:
            FileError: If the storage is corrupt.
        """
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        address = storage.data_ptr()
        if not self._expected or not size or address in self._intact:
            return
        # torch does not tell which member a storage was.
        if (size, crc32(memory_of(storage))) not in self._expected:
            raise self._archive.corrupt(f"the content of {name!r} does not match its checksum")
        self._intact.add(address)


def read_mapped(path: str | os.PathLike[str]) -> tuple[Any, Checksums]:
    """Return the content of a file, as :func:`mapped_content`, and its checksums."""
    with open_regular(path) as descriptor:
        archive = archive_of(descriptor, os.fspath(path), kinds.TORCH_SAVE)
        return mapped_content(archive, descriptor), Checksums(archive)


def mapped_content(archive: Archive, descriptor: int) -> Any:
    """Return the content of an archive, mapped into memory: its pickle is verified, not tensors.

    Args:
        archive: The archive.
        descriptor: The descriptor of its file.

    Raises:
        FileError: If the archive is corrupt, or cannot be loaded with ``weights_only=True``.
    """
    with collector_paused():
        # Kept for the unpickler, so that verifying does not read it as well.
        archive.text("data.pkl")
        archive.verify(name for name in archive.members if not name.startswith("data/"))
        content = _read_plain(archive, descriptor, "cpu")
        if content is None:
            content = _left_to_torch(archive, descriptor, "cpu", mmap=True)
        return content


def verify_checksums(path: str | os.PathLike[str]) -> None:
    """Test the checksums of a file of torch; files of formats without checksums pass.

    Args:
        path: File to test.

    Raises:
        FileError: If the file is corrupt, empty, or not as torch writes it.
    """
    with open_regular(path) as descriptor:
        if read_some(descriptor, 0, 2) in {b"", b"PK"}:
            Archive(descriptor, os.fspath(path)).verify()


def _left_to_torch(archive: Archive, source: int | bytes, map_location: Any, *, mmap: bool) -> Any:
    """Load with torch, from the file that has been verified even if another one has replaced it."""
    refused = f"{archive.what} cannot be read as a checkpoint"
    content = archive.text("data.pkl")
    if problem := pickle_problem(content, archive.members, trusted=allowed_by_user()):
        raise FileError(f"{refused}: data.pkl: {problem}")
    order = archive.text("byteorder") if "byteorder" in archive.members else b""
    on_meta = isinstance(map_location, (str, torch.device)) and str(map_location)[:4] == "meta"
    if order not in {b"", sys.byteorder.encode()} and (on_meta or tensors_are_fake()):
        raise FileError(f"{refused}: torch cannot swap the bytes of tensors without memory")

    names = extra_names(content)
    mapped = None
    if isinstance(source, int):
        mapped = path_of(source, archive.what) if mmap else None
        opened: IO[bytes] = os.fdopen(os.dup(source), "rb")
    else:
        opened = io.BytesIO(source)
    before = len(sparse_tensors_to_check())
    try:
        with opened as file:
            file.seek(0)
            if names:
                return load_with_names(file, map_location, names, mapped)
            return torch.load(mapped or file, map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(f"{refused}: {_unsafe_reason(error)}") from error
    except Exception as error:
        # Some messages of torch have a hundred lines.
        reason = str(error).partition("\n")[0][:500] or type(error).__name__
        raise FileError(f"{refused}: {reason}") from error
    finally:
        # Since 2.14, torch would otherwise refuse the next file for the tensors of this one.
        del sparse_tensors_to_check()[before:]


def _unsafe_reason(error: pickle.UnpicklingError) -> str:
    """Return why torch refuses a pickle, with the name that it refuses."""
    names = re.findall(r"GLOBAL ([\w.]{1,200}) was not an allowed global", str(error))
    if "must be imported to load DTensors" in str(error):
        return "it holds sharded tensors; to read them, import torch.distributed.tensor first"
    if not names:
        return "its pickle is invalid, or of a kind that weights_only=True does not read"
    return (
        f"it needs {names[0]}, and loading that would execute code; none was executed. If you "
        f"trust the file, load it inside torch.serialization.safe_globals([{names[0]}])"
    )


def _read_plain(archive: Archive, mapped: int | None, map_location: Any) -> Any:
    """Return the content of a plain state dict, or None to let torch read the file.

    Tensors are mapped from a descriptor, unverified, or verified while they are read.

    Args:
        archive: The file.
        mapped: Descriptor to map tensors from; None to read them.
        map_location: Device or function, as for ``torch.load``.

    Returns:
        The content; None if torch has to read the file.

    Raises:
        FileError: If the file is corrupt.
        Exception: Any error that ``map_location`` causes, such as an unavailable device.
    """
    if modes_are_active() or not is_for_plain_unpickler(archive):
        return None

    with Storages(archive, map_location, mapped) as storages:
        try:
            if storages.maps_by_function:
                # The function is called once for each storage: not here and then again by torch.
                _unpickled(archive, storages.plan)
            allocate = storages.on_meta if is_meta(map_location) else storages.allocate
            content = _unpickled(archive, allocate)
        except FileError:
            raise
        except Exception as error:
            # A device or a function that the caller names is not an error of the file.
            if map_location is not None and error is storages.error:
                raise
            # torch reads the file, or raises its own error.
            return None

        archive.read_all(storages.unread)
    return content


def _unpickled(archive: Archive, allocate: Callable[[str, str], torch.UntypedStorage]) -> Any:
    """Return the content of a plain state dict, or raise for torch to read it."""
    content = PlainUnpickler(archive, allocate).load()
    if not is_plain(content, set()):
        raise pickle.UnpicklingError
    return content


publish("modkit", load_checkpoint, save_checkpoint)
