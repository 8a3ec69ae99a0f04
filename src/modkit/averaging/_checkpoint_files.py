"""The tensors in a checkpoint, one at a time and with nothing run."""

import ctypes
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from modkit._files import library


_INDEX = ".index.json"
_IN_DIRECTORIES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


class Checkpoint:
    """Tensors by name: of a file of torch, of safetensors, or of the index of a sharded one.

    Only names and shapes are read at first; torch's files are mapped into memory. Each tensor of such a
    file is held against the checksum in it when it is read; files of safetensors have none.

    Args:
        path: The file, or a directory as transformers saves it.
        key: Where in a file of torch the state dict is, with dots between nested names.

    Raises:
        FileNotFoundError: There is no such file, or a shard is missing.
        ValueError: It cannot be read as a checkpoint, or holds something other than tensors.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        self.path = path
        self._shards: dict[str, _Shard] = {}
        file = file_in(path)
        if file.name.endswith(_INDEX):
            for shard, names in _shards_of(file).items():
                opened = _opened(shard, key)
                absent = [name for name in names if name not in opened.shapes]
                if absent:
                    raise ValueError(f"{shard} has no {absent[0]}, which {file} says is there")
                self._shards |= dict.fromkeys(names, opened)
        else:
            opened = _opened(file, key)
            self._shards = dict.fromkeys(opened.shapes, opened)
        if not self._shards:
            raise ValueError(f"{path} holds no tensors")
        self.shapes = {name: shard.shapes[name] for name, shard in self._shards.items()}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor.

        Raises:
            ValueError: Its bytes are not those that were written.
        """
        return self._shards[name].tensor(name)


class NoTensorsError(ValueError):
    """Something in a checkpoint is not a tensor; the message says what."""


def file_in(path: Path) -> Path:
    """Return the file to read: in a directory, the one that transformers would read."""
    if not path.is_dir():
        return path
    for name in _IN_DIRECTORIES:
        if (path / name).exists():
            return path / name
    raise FileNotFoundError(f"{path} is a directory without {', '.join(_IN_DIRECTORIES)}")


def is_safetensors(path: Path) -> bool:
    """Tell by its name whether a file has the format of safetensors."""
    return path.suffix == ".safetensors"


def load_plain(path: Path) -> Any:
    """Return what a file of torch holds, mapped into memory, with nothing run.

    Raises:
        ValueError: It cannot be read, or what it says about its tensors is damaged.
    """
    try:
        _check_small_records(path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error


class _Shard:
    """One file: the shapes in it, and its tensors."""

    shapes: dict[str, torch.Size]

    def tensor(self, name: str) -> Tensor:
        raise NotImplementedError


class _TorchFile(_Shard):
    def __init__(self, path: Path, key: str | None) -> None:
        self._path = path
        self._tensors = state_dict_at(load_plain(path), path, key)
        self._checksums = _storage_checksums(path)
        self._sound: set[int] = set()
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        if size and address not in self._sound:
            content = (ctypes.c_char * size).from_address(address)
            if (size, zlib.crc32(content)) not in self._checksums:
                raise ValueError(f"{self._path}: {name} is damaged: it does not fit its checksum")
            self._sound.add(address)
        return tensor


class _SafetensorsFile(_Shard):
    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there")
        safe_open = library("safetensors").safe_open
        try:
            self._file = safe_open(path, framework="pt")
            self.shapes = {
                name: torch.Size(self._file.get_slice(name).get_shape())
                for name in self._file.keys()  # noqa: SIM118 - it is no mapping
            }
        except Exception as error:
            raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error

    def tensor(self, name: str) -> Tensor:
        return cast("Tensor", self._file.get_tensor(name))


def _opened(path: Path, key: str | None) -> _Shard:
    return _SafetensorsFile(path) if is_safetensors(path) else _TorchFile(path, key)


def _shards_of(index: Path) -> dict[Path, list[str]]:
    """Return the names in each file that an index names."""
    try:
        names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, list[str]] = {}
        for name, file in names.items():
            shards.setdefault(index.with_name(file), []).append(name)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{index} cannot be read as an index of shards: {error!r}") from error
    return shards


def _check_small_records(path: Path) -> None:
    """Read all that is no tensor against its checksum, as torch does not."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if "/data/" not in record.filename:
                archive.read(record)


def _storage_checksums(path: Path) -> set[tuple[int, int]]:
    """Return the size and the checksum of each storage; a tensor must have one of these."""
    with zipfile.ZipFile(path) as archive:
        return {(record.file_size, record.CRC) for record in archive.infolist()}


def state_dict_at(found: Any, path: Path, key: str | None) -> dict[str, Tensor]:
    """Return the tensors at a key.

    Raises:
        ValueError: There is no such key, or something there is not a tensor.
    """
    part = ""
    try:
        for part in key.split(".") if key else ():
            found = _entry(found, part)
    except (KeyError, IndexError, TypeError, ValueError):
        raise NoTensorsError(f"{path} has no {part!r} on the way to key={key!r}") from None
    if not isinstance(found, Mapping):
        raise NoTensorsError(f"{path} holds no state dict but {type(found).__name__}")
    entries = cast("Mapping[str, Any]", found)
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            inside = [part for part, value in entries.items() if isinstance(value, Mapping)]
            help_ = f"; key= may be one of {', '.join(inside)}" if inside else ""
            raise NoTensorsError(f"{path}: {name!r} is no tensor but {type(value).__name__}{help_}")
    return dict(entries)


def _entry(found: object, part: str) -> Any:
    if isinstance(found, Mapping):
        return cast("Mapping[str, Any]", found)[part]
    if isinstance(found, Sequence):
        return found[int(part)]
    raise TypeError(part)
