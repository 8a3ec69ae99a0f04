"""The content of a model file, and whether the file is intact, without executing code from it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from modkit.errors import FileError
from modkit.files import kinds
from modkit.files.distributed_files import METADATA, DistributedFile
from modkit.files.inert import InertTensor
from modkit.files.kinds import check_facts, compare_digests, parse_digest
from modkit.files.safetensors_files import SafetensorsFile
from modkit.files.tensor_files import (
    INDEX,
    MAX_NAME,
    Checkpoint,
    file_in,
    listing_of,
    short_repr,
)
from modkit.files.torch_files import TorchFile
from modkit.files.zip_archive import Archive, archives_in, open_regular, read_some


_ARCHIVES: Final = {kinds.TORCH_SAVE, kinds.TORCHSCRIPT, kinds.EXPORT, kinds.PACKAGE}
NEVER_INTACT: Final = {
    *(kinds.EMPTY, kinds.CORRUPT_ZIP, kinds.TEXT, kinds.ZIP, kinds.PACKED, kinds.UNKNOWN)
}
_MOST_CLASSES: Final = 20
UNVERIFIED: Final = "unverified: no checksums"
# Members that are verified between two reports of progress.
_BATCH: Final = 16


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        name: Its name in the file; keys of nested dicts are joined by dots.
        shape: Its shape.
        dtype: Its dtype, such as ``"bfloat16"``.
        nbytes: Size in bytes of its elements.
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
            functions that rebuild sparse, quantized, nested, wrapped and meta tensors; the members
            of an archive, with their sizes.
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

    Example:
        >>> import torch
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"model": {"weight": torch.ones(2, 3)}, "epoch": 7}, path)
        >>> inspect(path).tensors[0]
        TensorInfo(name='model.weight', shape=(2, 3), dtype='float32', nbytes=24)
    """  # noqa: DOC501 - wrong_kind() makes a FileError
    file = file_in(Path(path))
    if is_table(file):
        checkpoint = DistributedFile(file) if file.name == METADATA else Checkpoint(file)
        kind = kinds.DISTRIBUTED if file.name == METADATA else kinds.SHARDED
        size = sum(path.stat().st_size for path in (file, *checkpoint.files))
        info = _of_table(checkpoint, FileInfo(os.fspath(path), kind, size, ""))
        others = checkpoint.others if isinstance(checkpoint, DistributedFile) else []
        return replace(info, entries=dict.fromkeys(others, "an object of its own"))

    with open_regular(file) as descriptor:
        kind = kinds.kind_of(descriptor)
        if kind in {kinds.EMPTY, kinds.CORRUPT_ZIP}:
            raise kinds.wrong_kind(descriptor, str(file), "a checkpoint or an archive")

        opened = SafetensorsFile(file) if kind == kinds.SAFETENSORS else None
        size = os.fstat(descriptor).st_size
        digest = kinds.sha256_of(descriptor) if hashed else ""
        info = FileInfo(os.fspath(path), kind, size, digest)

        if kind in {kinds.TORCH_SAVE, kinds.LEGACY}:
            return _of_torch_save(TorchFile(descriptor, str(file)), info)
        if kind in _ARCHIVES:
            members = Archive(descriptor, str(file)).members.items()
            return replace(
                info, entries={name: f"{member.file_size} bytes" for name, member in members}
            )
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

    Example:
        >>> import torch
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"weight": torch.ones(2, 3)}, path)
        >>> verify(path)
    """
    file = file_in(Path(path))
    parts = Checkpoint(file).files if is_table(file) else []
    if parts and sha256 is not None:
        raise FileError(f"{file} has shards, each with a SHA-256 of its own", kinds.SHARDED)
    for part in (file, *parts):
        check_file(part, sha256)


def is_table(file: Path) -> bool:
    """Return True for a file that names tensors in other files."""
    return file.name == METADATA or file.name.endswith(INDEX)


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
        sha256: Expected SHA-256.
        hashed: Compute the SHA-256 although none is expected.
        any_kind: Accept a file that is not a model, such as a text, if its SHA-256 is as expected.
        progress: Called with the fraction of the file that has been tested.

    Returns:
        How the file was tested. A safetensors file has no checksums.

    Raises:
        FileError: See :func:`verify`.
    """  # noqa: DOC501 - wrong_kind() makes a FileError
    how = ""
    if is_table(file):
        checkpoint = Checkpoint(file)
        how = f"index of {len(checkpoint.shapes):,} tensors in {len(checkpoint.files)} files"
        if checkpoint.unlisted:
            how += f", which have {checkpoint.unlisted:,} tensors more"

    expected = None if sha256 is None else parse_digest(sha256)
    with open_regular(file) as descriptor:
        kind = kinds.kind_of(descriptor)
        if kind in NEVER_INTACT and not (how or (any_kind and expected)):
            raise kinds.wrong_kind(descriptor, str(file), "a checkpoint or an archive of torch")

        archive = Archive(descriptor, str(file)) if kind in _ARCHIVES else None
        if kind == kinds.SAFETENSORS:
            SafetensorsFile(file)
            how = "header and sizes"
        elif archive is not None and archive.has_checksums:
            if kind != kinds.EXPORT:
                check_facts(archive)
            how = f"checksums of {len(archive.members):,} members"
        elif kind == kinds.CHAIN:
            places = archives_in(descriptor, os.fstat(descriptor).st_size)
            how = f"checksums of {len(places):,} archives"
            for start, end in places:
                part = Archive(read_some(descriptor, start, end - start), str(file))
                part.verify()
                how = how if part.has_checksums else ""
                # Before the next one is read.
                del part
        if not how and expected is None:
            advice = "compare its SHA-256 with the expected one"
            raise FileError(f"{file} is {UNVERIFIED} in a {kind}; {advice}", kind)

        if archive is not None:
            # In the order of the file.
            members = sorted(archive.members, key=lambda n: archive.members[n].header_offset)
            for first in range(0, len(members), _BATCH):
                archive.verify(members[first : first + _BATCH])
                progress(min(first + _BATCH, len(members)) / len(members))
        digest = kinds.sha256_of(descriptor, progress) if hashed or expected is not None else ""
        progress(1.0)
        if expected is not None:
            compare_digests(str(file), expected, digest)
            how = f"{how}, the expected SHA-256" if how else "the expected SHA-256"
        elif kind == kinds.SAFETENSORS:
            how += "; safetensors files have no checksums"
    return Tested(how, digest)


def _of_torch_save(file: TorchFile, info: FileInfo) -> FileInfo:
    """Describe a file of torch: its tensors, its other entries, and classes that were left out."""
    listing = listing_of(file.content.value)
    notes: list[str] = []
    if foreign := file.content.foreign:
        names = ", ".join(foreign[:_MOST_CLASSES]) + (", ..." if foreign[_MOST_CLASSES:] else "")
        notes.append(
            f"it needs {names}, for which placeholders are shown: loading that would execute code; "
            "none was executed"
        )
    if not file.has_checksums:
        notes.append(UNVERIFIED)
    if listing.is_cut:
        notes.append("the listing is cut: the file has too many entries")
    return replace(
        info,
        tensors=_described(listing.tensors),
        entries=listing.entries,
        groups=listing.groups,
        note="; ".join(notes),
    )


def _described(tensors: Mapping[str, InertTensor]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(n, t.shape, t.dtype, t.nbytes) for n, t in tensors.items())


def _of_table(opened: Checkpoint | SafetensorsFile | DistributedFile, info: FileInfo) -> FileInfo:
    """Describe a file that has tensors only."""
    return replace(info, tensors=_described(opened.tensors), groups={"": tuple(opened.tensors)})
