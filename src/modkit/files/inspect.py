"""The content of a model file, and whether the file is intact, without executing code from it."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from modkit.errors import FileError
from modkit.files import kinds
from modkit.files.checkpoints import UnsafeFileError, mapped_content
from modkit.files.kinds import archive_of, check_facts, other_file, parse_digest
from modkit.files.safetensors_files import SafetensorsFile
from modkit.files.tensor_files import (
    INDEX,
    MAX_NAME,
    Checkpoint,
    file_in,
    named_entries,
    short_repr,
)
from modkit.files.zip_archive import Archive, open_regular, read_some


# A hostile file can name one object a billion times. Each listed entry costs its name and 64.
_BUDGET: Final = 1 << 26
_DEEPEST: Final = 16
_ARCHIVES: Final = {kinds.TORCH_SAVE, kinds.TORCHSCRIPT, kinds.EXPORT}
NEVER_INTACT: Final = {kinds.EMPTY, kinds.CORRUPT_ZIP, kinds.TEXT, kinds.ZIP, kinds.UNKNOWN}
# Members that are verified before their bytes, still in the page cache, are hashed.
_BATCH: Final = 64
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        name: Its name in the file; keys of nested dicts are joined by dots.
        shape: Its shape; ``()`` for a nested tensor.
        dtype: Its dtype, such as ``"bfloat16"``.
        nbytes: Size in bytes of its elements; 0 for a sparse or nested tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class FileInfo:
    """The content of a file.

    Names are those in the file: print them with ``modkit.errors.printable``.

    Attributes:
        path: The path that ``inspect`` was given.
        kind: ``"torch.save file"``, ``"torch.save file (before torch 1.6)"``, ``"TorchScript
            archive"``, ``"torch.export archive"``, ``"safetensors file"``, ``"sharded
            checkpoint"``, ``"zip file"``, ``"pickle"``, ``"text file"`` or ``"unknown file"``.
        nbytes: Size of the file in bytes, including all shards.
        sha256: SHA-256 of the file, or ``""`` for a sharded checkpoint and with ``hashed=False``.
        tensors: The tensors, in the order of the file.
        entries: Other entries of a checkpoint, such as the epoch, with a shortened ``repr``; the
            members of an archive, with their sizes.
        groups: The names directly under each key that ``average_checkpoints`` accepts, ``""`` for
            the whole file.
        note: Remarks, for instance that loading the file would execute code, or that the listing is
            cut.
    """

    path: str
    kind: str
    nbytes: int
    sha256: str
    tensors: tuple[TensorInfo, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict[str, str])
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    note: str = ""


class Tested(NamedTuple):
    """How an intact file was tested, and its SHA-256, or ``""`` if that was not computed."""

    how: str
    sha256: str = ""


def inspect(path: str | os.PathLike[str], *, hashed: bool = True) -> FileInfo:
    """List the content of a model file, without executing code from it or testing its checksums.

    Args:
        path: A file, the ``.index.json`` of a sharded checkpoint, or a directory that transformers,
            diffusers or peft wrote, or that has a single checkpoint.
        hashed: Compute the SHA-256, for which the whole file is read. With False, only names,
            shapes and the pickle are read, which takes milliseconds for a file of any size.

    Returns:
        The kind of the file and its content. For a pickle that is more than plain data, ``note``
        says that loading it would execute code.

    Raises:
        FileNotFoundError: If there is no such file, or the directory has no checkpoint.
        FileError: If the file is empty, corrupt, or not a regular file.
        ImportError: If a safetensors file is inspected without the package safetensors.

    Example:
        >>> import torch
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"model": {"weight": torch.ones(2, 3)}, "epoch": 7}, path)
        >>> inspect(path).tensors[0]
        TensorInfo(name='model.weight', shape=(2, 3), dtype='float32', nbytes=24)
    """  # noqa: DOC501 - wrong_kind() makes a FileError
    file = file_in(Path(path))
    if file.name.endswith(INDEX):
        checkpoint = Checkpoint(file, None)
        size = sum(path.stat().st_size for path in (file, *checkpoint.files))
        return _of_table(checkpoint, FileInfo(os.fspath(path), kinds.SHARDED, size, ""))

    with open_regular(file) as descriptor:
        kind = kinds.kind_of(descriptor)
        if kind in {kinds.EMPTY, kinds.CORRUPT_ZIP}:
            raise kinds.wrong_kind(descriptor, str(file), "a checkpoint or an archive")

        opened = SafetensorsFile(file) if kind == kinds.SAFETENSORS else None
        size = os.fstat(descriptor).st_size
        digest = kinds.sha256_of(descriptor) if hashed else ""
        info = FileInfo(os.fspath(path), kind, size, digest)

        if kind == kinds.TORCH_SAVE:
            return _of_torch_save(descriptor, archive_of(descriptor, str(file), kind), info)
        if kind in {kinds.TORCHSCRIPT, kinds.EXPORT}:
            members = Archive(descriptor, str(file)).members.items()
            return replace(info, entries={name: f"{member.size} bytes" for name, member in members})
        if opened is not None:
            metadata = islice(opened.metadata.items(), 1000)
            entries = {name[:MAX_NAME]: short_repr(value) for name, value in metadata}
            return replace(_of_table(opened, info), entries=entries)
        note = kinds.first_line(descriptor) if kind == kinds.TEXT else kinds.ADVICE.get(kind, "")
        return replace(info, note=note)


def verify(path: str | os.PathLike[str], sha256: str | None = None) -> None:
    """Test whether a file is intact, without loading it.

    torch.save files, TorchScript and torch.export archives have a checksum for each record.
    Safetensors files have none; only their header is tested. Other files pass only with the right
    ``sha256``.

    Args:
        path: See :func:`inspect`.
        sha256: Expected SHA-256 of the file: 64 hexadecimal digits, optionally after ``sha256:``.

    Raises:
        FileNotFoundError: If there is no such file, or the directory has no checkpoint.
        FileError: If the file is corrupt, has another digest or no checksums, or is of another
            kind.
        ImportError: If a safetensors file is tested without the package safetensors.

    Example:
        >>> import torch
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"weight": torch.ones(2, 3)}, path)
        >>> verify(path)
    """
    file = file_in(Path(path))
    if file.name.endswith(INDEX):
        if sha256 is not None:
            raise FileError(f"{file} has shards, each with a SHA-256 of its own", kinds.SHARDED)
        for shard in Checkpoint(file, None).files:
            check_file(shard)
        return
    check_file(file, sha256)


def check_file(
    file: Path,
    sha256: str | None = None,
    *,
    hashed: bool = False,
    any_kind: bool = False,
    progress: Callable[[float], object] = lambda fraction: None,
) -> Tested:
    """Test whether one file is intact; of an index, whether its shards have all tensors.

    Args:
        file: The file.
        sha256: Expected SHA-256. The checksums are tested in the same read.
        hashed: Compute the SHA-256 although none is expected.
        any_kind: Accept a file that is not a model, such as a text, if its SHA-256 is as expected.
        progress: Called with the fraction of the file that has been tested.

    Returns:
        How the file was tested. A safetensors file has no checksums.

    Raises:
        FileError: See :func:`verify`.
    """  # noqa: DOC501 - other_file() and wrong_kind() make a FileError
    is_index = file.name.endswith(INDEX)
    how = ""
    if is_index:
        checkpoint = Checkpoint(file, None)
        how = f"index of {len(checkpoint.shapes):,} tensors in {len(checkpoint.files)} files"

    expected = None if sha256 is None else parse_digest(sha256)
    with open_regular(file) as descriptor:
        kind = kinds.kind_of(descriptor)
        if kind in NEVER_INTACT and not (is_index or (any_kind and expected)):
            raise kinds.wrong_kind(descriptor, str(file), "a checkpoint or an archive of torch")

        archive = Archive(descriptor, str(file)) if kind in _ARCHIVES else None
        if kind == kinds.SAFETENSORS:
            SafetensorsFile(file)
            how = "header and sizes"
        elif archive is not None and archive.has_checksums:
            if kind != kinds.EXPORT:
                check_facts(archive)
            how = f"checksums of {len(archive.members):,} members"
        elif expected is None and not is_index:
            advice = "compare its SHA-256 with the expected one"
            raise FileError(f"{file} is a {kind} and has no checksums: {advice}", kind)

        digest = _read_all(descriptor, archive, hashed or expected is not None, progress)
        if expected is not None:
            if digest != expected:
                raise other_file(str(file), expected, digest)
            how = f"{how}, the expected SHA-256" if how else "the expected SHA-256"
        elif kind == kinds.SAFETENSORS:
            how += "; safetensors files have no checksums"
    return Tested(how, digest)


def _read_all(
    descriptor: int, archive: Archive | None, hashed: bool, progress: Callable[[float], object]
) -> str:
    """Verify the members of an archive and hash the whole file, so that the disk reads it once."""
    size = os.fstat(descriptor).st_size
    members = sorted(archive.members.items(), key=lambda item: item[1].header) if archive else []
    digest = hashlib.sha256()
    hashed_bytes = 0

    for first in range(0, max(len(members), 1), _BATCH):
        if archive is not None:
            archive.verify(name for name, _ in members[first : first + _BATCH])
        following = members[first + _BATCH :][:1]
        end = following[0][1].header if following else size
        while hashed and hashed_bytes < end:
            chunk = read_some(descriptor, hashed_bytes, min(_CHUNK, end - hashed_bytes))
            if not chunk:
                break
            digest.update(chunk)
            hashed_bytes += len(chunk)
            progress(hashed_bytes / size)
        progress(end / max(size, 1))
    return digest.hexdigest() if hashed else ""


def _of_torch_save(descriptor: int, archive: Archive, info: FileInfo) -> FileInfo:
    # A corrupt pickle is an error, a pickle of something else than plain data is a note.
    if kinds.kind_of(archive.text("data.pkl")) != kinds.PICKLE:
        raise archive.corrupt("its pickle is invalid")
    try:
        return _of_content(mapped_content(archive, descriptor), info)
    except UnsafeFileError as error:
        reason = str(error).rpartition("cannot be read as a checkpoint: ")[2]
        return replace(info, note=f"{reason}. {kinds.ADVICE[kinds.PICKLE]}")
    except FileError:
        raise
    except RuntimeError as error:
        # torch cannot compute the size of some tensors that a pickle can describe.
        raise FileError(f"{info.path} is corrupt: invalid tensor: {error}", info.kind) from error


def _of_table(opened: Checkpoint | SafetensorsFile, info: FileInfo) -> FileInfo:
    """Describe a file of tensors from names, shapes and dtypes."""
    tensors: list[TensorInfo] = []
    for name, shape in opened.shapes.items():
        dtype = opened.dtypes[name]
        # float8_e4m3fn and F8_E4M3 have 8 bits, and so has bool.
        bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
        tensors.append(TensorInfo(name, tuple(shape), dtype, shape.numel() * bits // 8))
    return replace(info, tensors=tuple(tensors), groups={"": tuple(t.name for t in tensors)})


def _of_content(content: object, info: FileInfo) -> FileInfo:
    """Describe nested mappings and lists: their tensors and other entries, up to a budget."""
    tensors: list[TensorInfo] = []
    entries: dict[str, str] = {}
    groups: dict[str, tuple[str, ...]] = {}
    left = _BUDGET

    def walk(entry: object, key: str, depth: int) -> None:
        nonlocal left
        if isinstance(entry, Tensor):
            shape = () if entry.is_nested else tuple(entry.shape)
            # Sparse and nested tensors have no storage of their own.
            size = entry.nbytes if entry.layout == torch.strided and not entry.is_nested else 0
            tensors.append(TensorInfo(key, shape, str(entry.dtype)[6:], size))
            return
        items = None if depth > _DEEPEST else named_entries(entry)
        if items is None:
            entries[key] = short_repr(entry)
            return

        names: list[str] = []
        groups[key] = ()
        for name, value in items:
            left -= 64 + len(key) + len(name)
            if left < 0:
                break
            names.append(name)
            walk(value, f"{key}.{name}" if key else name, depth + 1)
        groups[key] = tuple(names)

    walk(content, "", 0)
    note = "the listing is cut: the file has too many entries" if left < 0 else ""
    return replace(info, tensors=tuple(tensors), entries=entries, groups=groups, note=note)
