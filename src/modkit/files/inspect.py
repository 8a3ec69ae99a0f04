"""What is in a file of a model, and whether the file is intact, without executing code from it."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from modkit.errors import FileError, printable
from modkit.files import kinds
from modkit.files.checkpoint_files import (
    DTYPES,
    INDEX,
    Checkpoint,
    dtype_name,
    file_in,
    safetensors_file,
)
from modkit.files.torch_files import UnsafeFileError, read_mapped
from modkit.files.zip_archive import Archive, open_regular


# A hostile file can name one object a billion times. Each listed entry costs its name and this much.
_BUDGET: Final = 1 << 26
_PER_ENTRY: Final = 64
_MAX_DEPTH: Final = 16
_MAX_NAME: Final = 1000
_WITH_CHECKSUMS: Final = {kinds.TORCH_SAVE, kinds.TORCHSCRIPT, kinds.EXPORT}
_NEVER_INTACT: Final = {*(kinds.EMPTY, kinds.CORRUPT_ZIP, kinds.TEXT, kinds.ZIP, kinds.UNKNOWN)}
_WOULD_EXECUTE: Final = (
    "loading it with pickle, as torch.load(weights_only=False) does, would execute code that it names. "
    "fickling and picklescan analyse such files"
)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file.

    Attributes:
        name: The name, with dots between nested keys.
        shape: The shape.
        dtype: The dtype as torch names it, such as ``"bfloat16"``.
        nbytes: Size of the elements in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class FileInfo:
    """What is in a file. Names are those in the file: print them with ``modkit.errors.printable``.

    Attributes:
        path: The path.
        kind: ``"torch.save file"``, ``"torch.save file (before torch 1.6)"``, ``"TorchScript archive"``,
            ``"torch.export archive"``, ``"safetensors file"``, ``"sharded checkpoint"``, ``"zip file"``,
            ``"pickle"``, ``"text file"`` or ``"unknown file"``.
        nbytes: Size in bytes, with all shards.
        sha256: SHA-256 of the file, or ``""`` for a sharded checkpoint.
        format_version: Version of the format as the file states it, or ``""``.
        tensors: The tensors. Those of TorchScript and torch.export archives are counted, not listed.
        n_tensors: Number of tensors.
        tensor_nbytes: Their size in bytes. Tensors that share a storage count once.
        entries: Other entries of a checkpoint, such as the epoch: key and shortened ``repr``.
        groups: For each key that ``modkit.average_checkpoints`` accepts, ``""`` for the whole file,
            the names directly under it.
        extra_files: Name and size in bytes of the extra files of a TorchScript archive.
        note: Remarks for the reader, for instance that loading the file would execute code.
    """

    path: str
    kind: str
    nbytes: int
    sha256: str
    format_version: str = ""
    tensors: tuple[TensorInfo, ...] = ()
    n_tensors: int = 0
    tensor_nbytes: int = 0
    entries: Mapping[str, str] = field(default_factory=dict[str, str])
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    extra_files: Mapping[str, int] = field(default_factory=dict[str, int])
    note: str = ""


def inspect(path: str | os.PathLike[str]) -> FileInfo:
    """List what is in a file of a model, without executing code from it.

    Checksums are not tested: use :func:`verify`.

    Args:
        path: A file, the ``.index.json`` of a sharded checkpoint, or a directory that transformers wrote.

    Returns:
        The kind of the file and its content. For a pickle that is more than plain data, ``note`` says that
        loading it would execute code. It also says when a very long listing is cut.

    Raises:
        FileNotFoundError: If there is no such file, or the directory has no checkpoint.
        FileError: If the file is empty, corrupt, or not a regular file.
        ImportError: If a safetensors file is inspected without the package safetensors.

    Example:
        >>> import torch
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"model": {"weight": torch.ones(2, 3)}, "epoch": 7}, path)
        >>> info = inspect(path)
        >>> info.kind, info.tensors[0].name, info.tensors[0].shape, info.entries
        ('torch.save file', 'model.weight', (2, 3), {'epoch': '7'})
    """
    file = file_in(Path(path))
    if file.name.endswith(INDEX):
        checkpoint = Checkpoint(file, None)
        listed = ((n, checkpoint.shapes[n], checkpoint.dtypes[n]) for n in checkpoint.shapes)
        size = sum(each.stat().st_size for each in (file, *checkpoint.files))
        return _of_table(listed, FileInfo(os.fspath(path), kinds.SHARDED, size, ""))
    with open_regular(file) as descriptor:
        kind = kinds.kind_of(descriptor)
        if kind in {kinds.EMPTY, kinds.CORRUPT_ZIP}:
            raise kinds.wrong_kind(descriptor, str(file), "a checkpoint or an archive")
        size, digest = os.fstat(descriptor).st_size, kinds.sha256_of(descriptor)
        info = FileInfo(os.fspath(path), kind, size, digest)
        if kind in {kinds.TORCH_SAVE, kinds.LEGACY}:
            return _of_torch_save(file, descriptor, info)
        if kind in {kinds.TORCHSCRIPT, kinds.EXPORT}:
            return _of_archive(Archive(descriptor, str(file)), info)
        if kind == kinds.SAFETENSORS:
            return _of_safetensors(file, info)
        if kind == kinds.TEXT:
            return replace(info, note=kinds.first_line(descriptor))
    return replace(info, note=_WOULD_EXECUTE) if kind == kinds.PICKLE else info


def verify(path: str | os.PathLike[str], sha256: str | None = None) -> None:
    """Test whether a file is intact, without loading it.

    torch.save files, TorchScript and torch.export archives have a checksum for each record. Safetensors
    files have none: their header is compared with the size of the file. Other files of torch, which
    have no checksums, pass only with the right ``sha256``.

    Args:
        path: A file, the ``.index.json`` of a sharded checkpoint, or a directory that transformers wrote.
        sha256: Expected SHA-256 of the file: 64 hexadecimal digits, optionally after ``sha256:``.

    Raises:
        ValueError: If ``sha256`` is not a digest.
        FileNotFoundError: If there is no such file, or the directory has no checkpoint.
        FileError: If the file is corrupt, has another digest or no checksums, or is of another kind.

    Example:
        >>> import torch
        >>> path = tmp_path / "last.pt"
        >>> torch.save({"weight": torch.ones(2, 3)}, path)
        >>> verify(path)
        >>> verify(path, sha256=inspect(path).sha256)
    """
    if sha256 is not None:
        kinds.parse_digest(sha256)
    file = file_in(Path(path))
    if file.name.endswith(INDEX):
        if sha256 is not None:
            raise FileError(f"{file} has shards, each with a SHA-256 of its own", kinds.SHARDED)
        for shard in Checkpoint(file, None).files:
            verify(shard)
        return
    with open_regular(file) as descriptor:
        if sha256 is not None:
            kinds.check_digest(descriptor, str(file), sha256)
        kind = kinds.kind_of(descriptor)
        if kind in _NEVER_INTACT:
            raise kinds.wrong_kind(descriptor, str(file), "a checkpoint or an archive of torch")
        if kind == kinds.SAFETENSORS:
            safetensors_file(file)
            return
        archive = Archive(descriptor, str(file)) if kind in _WITH_CHECKSUMS else None
        if archive is not None and archive.has_checksums:
            archive.verify()
        elif sha256 is None:
            advice = "compare its SHA-256 with the expected one"
            raise FileError(f"{file} is a {kind} and has no checksums: {advice}", kind)


def _of_torch_save(file: Path, descriptor: int, info: FileInfo) -> FileInfo:
    if info.kind == kinds.TORCH_SAVE:
        archive = Archive(descriptor, str(file))
        info = replace(info, format_version=_version_of(archive))
        # Corrupt bytes are an error, a pickle of something else than plain data is a note.
        if not kinds.is_pickle(archive.read("data.pkl")):
            raise archive.corrupt("its pickle is invalid")
    try:
        content, _ = read_mapped(file)
    except UnsafeFileError as error:
        reason = str(error).rpartition("cannot be read as a checkpoint: ")[2]
        return replace(info, note=f"{reason}. {_WOULD_EXECUTE}")
    try:
        return _of_content(content, info)
    except RuntimeError as error:
        # A pickle can make tensors of which torch cannot tell the size.
        raise FileError(
            f"{info.path} is corrupt: it has an odd tensor: {error}", info.kind
        ) from error


def _version_of(archive: Archive) -> str:
    for name in ("version", ".data/version"):
        if name in archive.members and archive.members[name].size <= 20:
            return printable(archive.read(name).decode("utf-8", "replace").strip())
    return ""


def _of_archive(archive: Archive, info: FileInfo) -> FileInfo:
    """Describe a TorchScript or torch.export archive by its members."""
    script = info.kind == kinds.TORCHSCRIPT
    folders = ("data/", "constants/") if script else ("data/weights/", "data/constants/")
    sizes = {name: member.size for name, member in archive.members.items()}
    tensors = [n for name, n in sizes.items() if name.startswith(folders) and ".json" not in name]
    extra = ((name[6:], n) for name, n in sizes.items() if name.startswith("extra/"))
    return replace(
        info,
        n_tensors=len(tensors),
        tensor_nbytes=sum(tensors),
        format_version=_version_of(archive),
        extra_files=dict(islice(extra, 1000)),
    )


def _of_safetensors(file: Path, info: FileInfo) -> FileInfo:
    opened = safetensors_file(file)
    slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - no mapping
    listed = ((name, each.get_shape(), str(each.get_dtype())) for name, each in slices)
    found = _of_table(((n, shape, DTYPES.get(dtype, dtype)) for n, shape, dtype in listed), info)
    metadata = islice(cast("Mapping[str, str]", opened.metadata() or {}).items(), 1000)
    return replace(found, entries={name[:_MAX_NAME]: _short(text) for name, text in metadata})


def _of_table(listed: Iterable[tuple[str, Iterable[int], str]], info: FileInfo) -> FileInfo:
    """Describe a file that has nothing but tensors, from names, shapes and dtypes."""
    tensors: list[TensorInfo] = []
    for name, lengths, dtype in listed:
        shape = torch.Size(lengths)
        # float8_e4m3fn and F8_E4M3 have 8 bits; bool names no number, and takes 8 bits too.
        bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
        tensors.append(TensorInfo(name, tuple(shape), dtype, shape.numel() * bits // 8))
    groups = {"": tuple(each.name for each in tensors)}
    return _with_tensors(info, tensors, sum(each.nbytes for each in tensors), groups=groups)


def _with_tensors(info: FileInfo, tensors: list[TensorInfo], nbytes: int, **facts: Any) -> FileInfo:
    return replace(
        info, tensors=tuple(tensors), n_tensors=len(tensors), tensor_nbytes=nbytes, **facts
    )


def _of_content(content: object, info: FileInfo) -> FileInfo:
    """Describe nested mappings and lists: their tensors and other entries, up to a budget."""
    tensors: list[TensorInfo] = []
    entries: dict[str, str] = {}
    groups: dict[str, tuple[str, ...]] = {}
    storages: dict[int, int] = {}
    left = _BUDGET

    def walk(found: object, key: str, depth: int) -> None:
        nonlocal left
        if isinstance(found, Tensor):
            # Sparse and nested tensors have no storage of their own.
            plain = found.layout == torch.strided and not found.is_nested
            if plain:
                storage = Tensor.untyped_storage(found)
                storages[storage.data_ptr() or -len(tensors)] = storage.nbytes()
            shape = () if found.is_nested else tuple(found.shape)
            nbytes = found.nbytes if plain else 0
            tensors.append(TensorInfo(key, shape, dtype_name(found), nbytes))
            return
        items = None if depth > _MAX_DEPTH else _items(found)
        if items is None:
            entries[key] = _short(found)
            return
        names: list[str] = []
        groups[key] = ()
        for name, value in items:
            left -= _PER_ENTRY + len(key) + len(name)
            if left < 0:
                break
            names.append(name)
            walk(value, f"{key}.{name}" if key else name, depth + 1)
        groups[key] = tuple(names)

    walk(content, "", 0)
    note = "the listing is cut: the file has too many entries" if left < 0 else ""
    size = sum(storages.values())
    return _with_tensors(info, tensors, size, entries=entries, groups=groups, note=note)


def _items(found: object) -> Iterable[tuple[str, object]] | None:
    """Return what is nested in a mapping, or in a list that begins with tensors or mappings."""
    if isinstance(found, argparse.Namespace):
        found = vars(found)
    if isinstance(found, Mapping):
        entries = cast("Mapping[object, object]", found)
        # An attribute from the file may hide the method.
        pairs = dict.items(found) if isinstance(found, dict) else entries.items()
        return ((n[:_MAX_NAME] if isinstance(n, str) else _short(n), v) for n, v in pairs)
    if isinstance(found, (list, tuple)):
        values = cast("Sequence[object]", found)
        if any(isinstance(value, (Tensor, Mapping)) for value in islice(values, 100)):
            return ((str(index), value) for index, value in enumerate(values))
    return None


def _short(value: object, *, nested: bool = False) -> str:
    """Return a ``repr`` whose length and cost do not depend on the size of the value."""
    if isinstance(value, (list, tuple)) and not nested:
        values = cast("Sequence[object]", value)
        parts = [_short(each, nested=True) for each in values[:8]]
        text = ", ".join([*parts, "..."] if len(values) > 8 else parts)
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if isinstance(value, (str, bytes)):
        return printable(repr(value[:60]) + ("..." if len(value) > 60 else ""))
    small = isinstance(value, int) and value.bit_length() <= 256
    if small or value is None or isinstance(value, (float, complex, torch.dtype, torch.device)):
        return repr(value)
    return type(value).__name__
