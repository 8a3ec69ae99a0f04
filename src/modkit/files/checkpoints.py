"""Checkpoints of ``torch.save``: written atomically, read with verified checksums.

Storages are verified while they are read, then the pickle is read with the names that
``torch.load(weights_only=True)`` allows. Old formats, other byte orders and modes of torch are left
to ``torch.load``, after the file is verified. Neither executes code from the file.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import torch

from modkit._messages import warn_user
from modkit._namespace import publish
from modkit._upstream import (
    allowed_by_user,
    check_sparse_tensors,
    is_meta,
    modes_are_active,
    never_compiled,
    sparse_tensors_to_check,
    tensors_are_fake,
)
from modkit.errors import FileError, shown
from modkit.files.atomic_write import atomic_write
from modkit.files.checkpoint_values import REFUSALS, check_readable, readable_names, refused
from modkit.files.inert import Content
from modkit.files.operating_system import PATH_TYPES, AnyPath, path_of
from modkit.files.pickle_limits import collector_paused
from modkit.files.torch_files import TorchFile
from modkit.files.weights_only import LeftToTorchError, Loader, is_usual
from modkit.files.zip_archive import MOST_TEXT, Archive, file_of, open_source, read_some


__all__ = ["load_checkpoint", "save_checkpoint"]


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
            that is open as text, and if the arguments are swapped.
        ValueError: If the checkpoint has more than 128 MB without its tensors.
        OSError: If the file cannot be written, with ``errno`` and the path.
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

    with atomic_write(path) as unfinished:
        _save_readable(checkpoint, unfinished)


def write_checkpoint(content: object, path: AnyPath) -> None:
    """Write any object that ``torch.save`` can write, but atomically and always with checksums."""
    with atomic_write(path) as unfinished:
        _save(content, unfinished)


def _save_readable(checkpoint: object, target: Path | io.BytesIO) -> None:
    """Write a checkpoint, and raise TypeError if it holds what ``load_checkpoint`` refuses."""
    try:
        _save(checkpoint, target)
    except REFUSALS as error:
        raise refused(checkpoint) from error

    with open_source(target) as (source, what):
        archive = Archive(source, what)
        size = archive.members["data.pkl"].file_size
        if size > MOST_TEXT:
            raise ValueError(
                f"save_checkpoint: without its tensors it has {size:,} bytes, and load_checkpoint "
                f"reads {MOST_TEXT:,}; save long lists as tensors"
            )
        check_readable(archive.read("data.pkl"), checkpoint)


def _write_in_place(content: object, target: Any) -> None:
    """Write into an open file, or into a path as it is, once the content is complete."""
    path = Path(os.fsdecode(target)) if isinstance(target, PATH_TYPES) else None
    buffer = io.BytesIO()
    if not path and not callable(getattr(target, "write", None)):
        if isinstance(target, Mapping):
            raise TypeError("save_checkpoint(): got a path first; pass (checkpoint, path)")
        _save(content, target)  # raises torch's error
    _save_readable(content, buffer)

    opened: Any = path.open("wb") if path else nullcontext(target)
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


def _save(content: object, target: Any) -> None:
    """Write as torch does, with checksums even if the user has turned them off."""
    option = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(content, target)
    finally:
        torch.serialization.set_crc32_options(option)
    # Torch 2.8 raises no error if the last write of a file fails.
    if isinstance(target, Path) and not zipfile.is_zipfile(target):
        raise RuntimeError("PytorchStreamWriter has not written the end of the file")


@never_compiled
def load_checkpoint(
    path: AnyPath | IO[bytes],
    map_location: Any = None,
    *,
    mmap: bool = False,
    verify: bool = True,
) -> Any:
    """Read a file of ``torch.save`` after verifying its checksums.

    ``torch.load`` ignores the checksums: a flipped bit in the file silently becomes another weight
    (https://github.com/pytorch/pytorch/issues/126952). Here tensors are verified while they are
    read: many small tensors are faster than with ``torch.load``, large ones take about the same
    time if the package zlib-ng is installed. Old formats are read by torch.

    Args:
        path: The file, or one that is open for reading, which is read into memory from its position
            on.
        map_location: Device of the tensors, a dict of devices, or a function, as in ``torch.load``.
            A function receives verified storages. With ``"meta"``, the content of tensors is
            neither read nor verified; everything else is.
        mmap: Map the file into memory instead of reading the tensors. It must not be changed in
            place while they are in use; replacing it, as ``save_checkpoint`` does, is safe, or
            refused (Windows).
        verify: With ``mmap=True``, False opens the file without reading its tensors, in the time
            of ``torch.load(mmap=True)``. A flipped bit in a tensor is then not noticed;
            ``modkit.files.verify(path)`` compares all checksums later.

    Returns:
        What ``torch.load(path, map_location, weights_only=True)`` returns. No code from the file is
        executed.

    Warns:
        UserWarning: If the file has no checksums: one from before torch 1.6, or one that was
            written with ``torch.serialization.set_crc32_options(False)``. ``modkit convert`` writes
            it with checksums.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a directory.
        FileError: If it is corrupt, is of another kind, or cannot be loaded with
            ``weights_only=True``. It names all classes that the file needs.
        RuntimeError: If ``map_location`` names a device that is not available, as ``torch.load``
            raises. What a function raises is passed on.
        ValueError: If ``mmap`` is True for an open file, or ``verify`` False without ``mmap``.
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
    if not verify and not mmap:
        raise ValueError("load_checkpoint: verify=False needs mmap=True")
    if not isinstance(path, PATH_TYPES):
        if mmap:
            raise ValueError("f must be a file path in order to use the mmap argument")
        if not hasattr(path, "read"):
            torch.load(path, weights_only=True)  # raises torch's error

    with open_source(path) as (source, what), collector_paused():
        # Its pickles are within the limits, and its storages within the file.
        opened = TorchFile(source, what)
        if problem := opened.content.problem(allowed_by_user()):
            raise FileError(f"{what} cannot be read as a checkpoint: data.pkl: {problem}")
        archive = opened.archive
        content = None
        if archive is not None:
            checked = set(archive.members)
            if is_meta(map_location) or not verify:
                # The content of tensors is not read.
                checked = {name for name in checked if not name.startswith("data/")}
            if mmap:
                archive.verify(checked)
            mapped = source if mmap and isinstance(source, int) else None
            content = _loaded(opened, map_location, mapped)
            # Members that have not been read yet, such as tensors that the pickle does not name.
            archive.verify(checked)
        if content is None:
            content = _left_to_torch(opened, source, what, map_location, mmap)
        if not opened.has_checksums:
            warn_user(
                f"{shown(what)} has no checksums, so it is read unverified; `modkit convert` "
                "writes it with them"
            )
        return content


def verify_checksums(path: str | os.PathLike[str]) -> None:
    """Test the checksums of a file of torch; files of formats without checksums pass.

    Args:
        path: File to test.

    Raises:
        FileError: If the file is corrupt, empty, or not as torch writes it.
    """
    with open_source(path) as (source, what):
        if read_some(source, 0, 2) in {b"", b"PK"}:
            Archive(source, what).verify()


def _left_to_torch(
    opened: TorchFile, source: int | bytes, what: str, map_location: Any, mmap: bool
) -> Any:
    """Load with torch, from the file that has been verified even if another one has replaced it."""
    refused = f"{what} cannot be read as a checkpoint"
    archive = opened.archive
    on_meta = isinstance(map_location, (str, torch.device)) and str(map_location)[:4] == "meta"
    if archive and archive.is_of_other_byte_order and (on_meta or tensors_are_fake()):
        raise FileError(f"{what}: torch cannot swap the bytes of tensors without memory")

    mapped = path_of(source, what) if mmap and isinstance(source, int) else None
    before = len(sparse_tensors_to_check())
    try:
        with file_of(source) as file:
            file.seek(0)
            return torch.load(mapped or file, map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise FileError(f"{refused}: {_unsafe_reason(error, opened.content)}") from error
    except Exception as error:
        # Some messages of torch have a hundred lines.
        reason = str(error).partition("\n")[0][:500] or type(error).__name__
        raise FileError(f"{refused}: {reason}") from error
    finally:
        # Since 2.14, torch would otherwise refuse the next file for the tensors of this one.
        del sparse_tensors_to_check()[before:]


def _unsafe_reason(error: pickle.UnpicklingError, content: Content) -> str:
    """Return why torch refuses a pickle: all names in it that it would execute, and what to do."""
    if "must be imported to load DTensors" in str(error):
        return "it holds sharded tensors; to read them, import torch.distributed.tensor first"
    known = readable_names(content.names)
    names = [name.removeprefix("builtins.") for name in content.foreign if name not in known]
    if "torch._C.ScriptObject" in content.foreign:
        return (
            "it holds objects of TorchScript, which weights_only=True never reads; if you trust "
            "the file, torch.load(path, weights_only=False) executes its code"
        )
    if not names:
        return "its pickle is invalid, or of a kind that weights_only=True does not read"
    joined = ", ".join(names)
    return (
        f"it needs {joined}, and loading that would execute code; none was executed. `modkit "
        "convert --key` takes the tensors out of it. If you trust the file, load it inside "
        f"torch.serialization.safe_globals([{joined}])"
    )


def _loaded(opened: TorchFile, map_location: Any, mapped: int | None) -> Any:
    """Return the content with tensors, or None to let torch read the file, or raise its error."""
    names = readable_names(opened.content.names)
    if not is_usual(opened, names) or modes_are_active():
        return None

    loader = Loader(opened, names, map_location, mapped)
    try:
        loader.read_storages()
    except LeftToTorchError:
        return None
    except Exception as error:
        # A device or a function that the caller names is not an error of the file.
        if isinstance(error, FileError) or map_location is not None:
            raise
        return None

    with suppress(Exception):
        loaded = loader.load()
        check_sparse_tensors()
        return loaded
    return None


publish("modkit", load_checkpoint, save_checkpoint)
