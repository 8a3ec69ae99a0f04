"""The tensors in a checkpoint, one at a time and with nothing run."""

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from modkit.files.safetensors_files import DTYPES, safetensors_file
from modkit.files.torch_files import read_mapped


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
                opened = _shard_of(file, shard, names[0], key)
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
        self.dtypes = {name: shard.dtypes[name] for name, shard in self._shards.items()}
        self.versions: Mapping[str, Any] = {}
        for opened in set(self._shards.values()):
            self.versions = {**self.versions, **opened.versions}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor.

        Raises:
            ValueError: Its bytes are not those that were written.
        """
        return self._shards[name].tensor(name)

    def memory(self, name: str) -> Hashable:
        """Return the same for tensors that are tied, and None for one that cannot be."""
        return self._shards[name].memory(name)


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


class _Shard:
    """One file: the shapes and dtypes in it, and its tensors."""

    shapes: dict[str, torch.Size]
    dtypes: dict[str, str]
    # What `state_dict()` says of the versions of modules, which some of them need to load.
    versions: Mapping[str, Any] = MappingProxyType({})

    def tensor(self, name: str) -> Tensor:
        raise NotImplementedError

    def memory(self, name: str) -> Hashable:
        """Return the same for tensors that are tied, and None where that cannot be."""
        return None


class _TorchFile(_Shard):
    def __init__(self, path: Path, key: str | None) -> None:
        content, self._checksums = read_mapped(path)
        self.versions, self._tensors = state_dict_at(content, path, key)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: dtype_name(tensor) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self._checksums.check(name, tensor)
        return tensor

    def memory(self, name: str) -> Hashable:
        tensor = self._tensors[name]
        if not tensor.numel():
            return None
        return id(self), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _SafetensorsFile(_Shard):
    def __init__(self, path: Path) -> None:
        self._file = safetensors_file(path)
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 - it is no mapping
        self.shapes = {name: torch.Size(found.get_shape()) for name, found in slices.items()}
        self.dtypes = {
            name: DTYPES.get(found.get_dtype(), str(found.get_dtype()))
            for name, found in slices.items()
        }

    def tensor(self, name: str) -> Tensor:
        return cast("Tensor", self._file.get_tensor(name))


def _opened(path: Path, key: str | None) -> _Shard:
    return _SafetensorsFile(path) if is_safetensors(path) else _TorchFile(path, key)


def _shard_of(index: Path, path: Path, name: str, key: str | None) -> _Shard:
    try:
        return _opened(path, key)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there, which has {name} as {index} says") from None


def dtype_name(tensor: Tensor) -> str:
    """Return what the dtype is called, without the name of torch before it."""
    return str(tensor.dtype).removeprefix("torch.")


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


def state_dict_at(
    found: Any, path: Path, key: str | None
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the tensors at a key, and before them what is said of the versions of modules.

    Raises:
        ValueError: There is no such key, or something there is not a tensor that can be averaged.
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
        if problem := _problem_of(name, value):
            inside = [str(part) for part, value in entries.items() if isinstance(value, Mapping)]
            help_ = f"; key= may be one of {', '.join(inside)}" if inside else ""
            raise NoTensorsError(f"{path}: {name!r} is {problem}{help_}")
    return getattr(entries, "_metadata", {}), dict(entries)


def _problem_of(name: object, value: object) -> str | None:
    """Say why an entry cannot be averaged, if that is so."""
    if not isinstance(value, Tensor):
        return f"no tensor but {type(value).__name__}"
    if not isinstance(name, str):
        return "no name of a tensor"
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return "a tensor without plain memory (sparse, quantized or nested)"
    if value.is_meta:
        return "a tensor without values, on the device meta"
    return None


def _entry(found: object, part: str) -> Any:
    if isinstance(found, Mapping):
        return cast("Mapping[str, Any]", found)[part]
    if isinstance(found, Sequence):
        return found[int(part)]
    raise TypeError(part)
