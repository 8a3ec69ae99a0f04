"""What is in a file of a model, and whether the file is intact, without executing code from it."""

import argparse
import hashlib
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from modkit.errors import FileError, printable
from modkit.files import kinds
from modkit.files.checkpoint_files import Checkpoint, dtype_name, file_in
from modkit.files.safetensors_files import DTYPES, library
from modkit.files.torch_files import load_plain
from modkit.files.zip_check import Archive


# A hostile file can name one object a billion times. Each listed entry costs its name and this much.
_BUDGET: Final = 1 << 26
_PER_ENTRY: Final = 64
_MAX_DEPTH: Final = 16
_MAX_NAME: Final = 1000
_MAX_INDEX: Final = 1 << 28
_CHUNK: Final = 1 << 20
_WITH_CHECKSUMS: Final = {kinds.TORCH_SAVE, kinds.TORCHSCRIPT, kinds.EXPORT}
_UNSAFE: Final = re.compile(r"GLOBAL ([\w.]{1,200}) was not an allowed global")
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
        groups: For each key that :func:`~modkit.averaging.checkpoints.average_checkpoints` accepts, ``""`` for the whole file,
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
        >>> import pathlib, tempfile, torch
        >>> path = pathlib.Path(tempfile.mkdtemp(), "last.pt")
        >>> torch.save({"model": {"weight": torch.ones(2, 3)}, "epoch": 7}, path)
        >>> info = inspect(path)
        >>> info.kind, info.tensors[0].name, info.tensors[0].shape, info.entries
        ('torch.save file', 'model.weight', (2, 3), {'epoch': '7'})
    """
    file, kind, shards = _identified(Path(path))
    size = sum(map(kinds.check_regular, (file, *shards)))
    info = FileInfo(os.fspath(path), kind, size, "" if shards else _sha256(file))
    try:
        if kind in {kinds.TORCH_SAVE, kinds.LEGACY}:
            return _of_torch_save(file, info)
        if kind in _WITH_CHECKSUMS:
            return _of_archive(file, info)
        if kind == kinds.SAFETENSORS:
            return _of_safetensors(file, info)
        if kind == kinds.SHARDED:
            found = Checkpoint(file, None)
            return _of_table(((n, found.shapes[n], found.dtypes[n]) for n in found.shapes), info)
    except (FileError, OSError, ImportError):
        raise
    except Exception as error:
        raise _corrupt(file, error, kind) from error
    if kind == kinds.TEXT:
        return replace(info, note=kinds.first_line(file))
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
        >>> import pathlib, tempfile, torch
        >>> path = pathlib.Path(tempfile.mkdtemp(), "last.pt")
        >>> torch.save({"weight": torch.ones(2, 3)}, path)
        >>> verify(path)
        >>> verify(path, sha256=inspect(path).sha256)
    """
    wanted = None if sha256 is None else parse_digest(sha256)
    file, kind, shards = _identified(Path(path))
    if wanted is not None:
        found = "no single SHA-256" if shards else _sha256(file)
        if found != wanted:
            raise FileError(f"{path} has the SHA-256 {found}, not {wanted}", kind)
    for each in shards or [file]:
        _verify_one(each, kinds.kind_of(each), has_digest=wanted is not None)


def parse_digest(sha256: str) -> str:
    """Return the hexadecimal digits of a SHA-256 in lower case, or raise ``ValueError``."""
    text = sha256.strip().lower().removeprefix("sha256:")
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError(
            f"{sha256!r} is not a SHA-256 digest: 64 hexadecimal digits, optionally after 'sha256:'"
        )
    return text


def _verify_one(file: Path, kind: str, *, has_digest: bool) -> None:
    if kind == kinds.SAFETENSORS:
        try:
            library("safetensors").safe_open(file, framework="pt").keys()
        except (OSError, ImportError):
            raise
        except Exception as error:
            raise _corrupt(file, error, kind) from error
        return
    if kind in {kinds.EMPTY, kinds.CORRUPT_ZIP, kinds.TEXT, kinds.ZIP, kinds.UNKNOWN}:
        raise kinds.wrong_kind(file, kind, "a checkpoint or an archive of torch")
    if kind in _WITH_CHECKSUMS:
        with file.open("rb") as opened:
            archive = Archive(opened, str(file))
            archive.check_unambiguous()
            # torch.serialization.set_crc32_options(False) writes zeros in place of all checksums.
            if any(member.CRC for member in archive.members.values()):
                archive.verify()
                return
    if not has_digest:
        advice = "compare its SHA-256 with the expected one"
        raise FileError(f"{file} is a {kind} and has no checksums: {advice}", kind)


def _identified(path: Path) -> tuple[Path, str, list[Path]]:
    """Return the file to read, its kind, and the shards beside it if it is an index."""
    file = file_in(path)
    if file.name.endswith(".index.json"):
        return file, kinds.SHARDED, _shards_of(file)
    kind = kinds.kind_of(file)
    if kind in {kinds.EMPTY, kinds.CORRUPT_ZIP}:
        reason = "it is empty" if kind == kinds.EMPTY else "its zip directory cannot be read"
        raise FileError(f"{file} is corrupt: {reason}", kind)
    return file, kind, []


def _shards_of(index: Path) -> list[Path]:
    kinds.check_regular(index)
    try:
        with index.open("rb") as file:
            found = json.loads(file.read(_MAX_INDEX))["weight_map"].values()
        shards = sorted({index.with_name(name) for name in found})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(index, error, kinds.SHARDED) from error
    for shard in shards:
        kinds.check_regular(shard)
    return shards


def _sha256(file: Path) -> str:
    digest, left = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as opened:
        while left > 0 and (chunk := opened.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _corrupt(file: Path, error: BaseException, kind: str) -> FileError:
    return FileError(f"{file} is corrupt: {str(error).strip() or type(error).__name__}", kind)


def _of_torch_save(file: Path, info: FileInfo) -> FileInfo:
    is_pickle = True
    if info.kind == kinds.TORCH_SAVE:
        with file.open("rb") as opened:
            archive = Archive(opened, str(file))
            info = replace(info, format_version=_version_of(archive))
            is_pickle = kinds.looks_like_pickle(archive.read("data.pkl"))
    try:
        return _Listing().of(load_plain(file), info)
    except Exception as error:
        chain = list(islice(_chain(error), 10))
        # torch raises UnpicklingError for corrupt pickles too.
        if not is_pickle or not any(isinstance(each, pickle.UnpicklingError) for each in chain):
            raise
        classes = _unsafe_classes(file, " ".join(map(str, chain))) or "more than plain data"
        return replace(info, note=f"it holds {classes}: {_WOULD_EXECUTE}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unsafe_classes(file: Path, text: str) -> str:
    """Return the first ten classes that torch names, in the file or in the text of its errors."""
    try:
        found = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # noqa: BLE001 - torch's disassembler fails in many ways, and for old formats
        found = set(_UNSAFE.findall(text))
    return ", ".join(printable(n[:200]) for n in sorted(found - {"argparse.Namespace"})[:10])


def _version_of(archive: Archive) -> str:
    for name in ("version", ".data/version"):
        if 0 < archive.sizes.get(name, 0) <= 20:
            return printable(archive.text(name).strip())
    return ""


def _of_archive(file: Path, info: FileInfo) -> FileInfo:
    """Describe a TorchScript or torch.export archive by its zip directory alone."""
    with file.open("rb") as opened:
        archive = Archive(opened, str(file))
        version, sizes = _version_of(archive), archive.sizes
    script = info.kind == kinds.TORCHSCRIPT
    folders = ("data/", "constants/") if script else ("data/weights/", "data/constants/")
    tensors = [n for name, n in sizes.items() if name.startswith(folders) and ".json" not in name]
    extra = ((name[6:], n) for name, n in sizes.items() if name.startswith("extra/"))
    found = replace(info, n_tensors=len(tensors), tensor_nbytes=sum(tensors))
    return replace(found, format_version=version, extra_files=dict(islice(extra, 1000)))


def _of_safetensors(file: Path, info: FileInfo) -> FileInfo:
    with library("safetensors").safe_open(file, framework="pt") as opened:
        slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - no mapping
        listed = ((name, each.get_shape(), str(each.get_dtype())) for name, each in slices)
        found = _of_table(
            ((n, shape, DTYPES.get(dtype, dtype)) for n, shape, dtype in listed), info
        )
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
    nbytes = sum(each.nbytes for each in tensors)
    return replace(
        info, tensors=tuple(tensors), n_tensors=len(tensors), tensor_nbytes=nbytes, groups=groups
    )


class _Listing:
    """The tensors and other entries of nested mappings and lists, up to a budget."""

    def __init__(self) -> None:
        self.left = _BUDGET
        self.tensors: list[TensorInfo] = []
        self.entries: dict[str, str] = {}
        self.groups: dict[str, tuple[str, ...]] = {}
        self.storages: dict[int, int] = {}

    def of(self, content: object, info: FileInfo) -> FileInfo:
        self.walk(content, "", 0)
        return replace(
            info,
            tensors=tuple(self.tensors),
            n_tensors=len(self.tensors),
            tensor_nbytes=sum(self.storages.values()),
            entries=self.entries,
            groups=self.groups,
            note="the listing is cut: the file has too many entries" if self.left < 0 else "",
        )

    def walk(self, found: object, key: str, depth: int) -> None:
        if isinstance(found, Tensor):
            self.add(found, key)
            return
        items = None if depth > _MAX_DEPTH else _items(found)
        if items is None:
            self.entries[key] = _short(found)
            return
        names: list[str] = []
        self.groups[key] = ()
        for name, value in items:
            self.left -= _PER_ENTRY + len(key) + len(name)
            if self.left < 0:
                break
            names.append(name)
            self.walk(value, f"{key}.{name}" if key else name, depth + 1)
        self.groups[key] = tuple(names)

    def add(self, tensor: Tensor, name: str) -> None:
        nbytes, shape = 0, () if tensor.is_nested else tuple(tensor.shape)
        # Sparse and nested tensors have no storage of their own.
        if tensor.layout == torch.strided and not tensor.is_nested:
            nbytes, storage = tensor.nbytes, tensor.untyped_storage()
            self.storages[storage.data_ptr() or -len(self.tensors)] = storage.nbytes()
        self.tensors.append(TensorInfo(name, shape, dtype_name(tensor), nbytes))


def _items(found: object) -> Iterable[tuple[str, object]] | None:
    """Return what is nested in a mapping, or in a list that begins with tensors or mappings."""
    if isinstance(found, argparse.Namespace):
        found = vars(found)
    if isinstance(found, Mapping):
        entries = cast("Mapping[object, object]", found)
        return ((n[:_MAX_NAME] if isinstance(n, str) else _short(n), v) for n, v in entries.items())
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
