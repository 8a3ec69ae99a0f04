"""The tensors of a checkpoint, read one at a time: torch or safetensors files, or shards of either."""

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from modkit.errors import FileError, shown
from modkit.files.checkpoints import read_mapped
from modkit.files.kinds import SHARDED
from modkit.files.safetensors_files import SafetensorsFile, check_json
from modkit.files.zip_archive import open_regular, read_some


INDEX: Final = ".index.json"
# The files of transformers, diffusers and peft in a directory; each reads the first that exists.
_IN_DIRECTORIES: Final = tuple(
    tuple(f"{name}{end}" for name in names for end in (INDEX, ""))
    for names in (
        ("model.safetensors", "pytorch_model.bin"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
        ("adapter_model.safetensors", "adapter_model.bin"),
    )
)
_SUFFIXES: Final = {".pt", ".pth", ".ckpt", ".safetensors"}
_MOST_INDEX: Final = 1 << 25  # a hundred times the index of the largest model
_MOST_EXPANDED: Final = 1 << 30
_FLOAT4: Final = getattr(torch, "float4_e2m1fn_x2", None)  # since torch 2.8


class Checkpoint:
    """The tensors of a checkpoint by name, and the ``_metadata`` of its state dict as ``versions``.

    Opening reads names and shapes. Tensors of torch files are verified when they are read; safetensors
    files have no checksums.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        file = file_in(path)
        is_index = file.name.endswith(INDEX)
        shards: Mapping[Path, list[str] | None] = shards_of(file) if is_index else {file: None}
        self._homes: dict[str, _TorchFile | SafetensorsFile] = {}
        self.files: list[Path] = list(shards)
        self.versions: Mapping[str, Any] = {}
        self.metadata: Mapping[str, str] = {}
        for shard, names in shards.items():
            # False also for a name that no file can have, where Path.exists() raises.
            if names and not os.path.exists(shard):  # noqa: PTH110
                text = f"{shard} is missing; {file} lists {names[0]} in it"
                raise FileNotFoundError(shown(text))
            safetensors = shard.suffix == ".safetensors"
            opened = SafetensorsFile(shard) if safetensors else _TorchFile(shard, key)
            if absent := [name for name in names or () if name not in opened.shapes]:
                raise FileError(f"{shard} has no {absent[0]}, which {file} lists in it", SHARDED)
            self._homes |= dict.fromkeys(names or opened.shapes, opened)
            self.versions = {**self.versions, **opened.versions}
            self.metadata = {**self.metadata, **opened.metadata}
        if not self._homes:
            raise FileError(f"{path} holds no tensors")
        self.shapes: dict[str, torch.Size] = {
            name: home.shapes[name] for name, home in self._homes.items()
        }
        self.dtypes: dict[str, str] = {
            name: home.dtypes[name] for name, home in self._homes.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, verified."""
        return self._homes[name].tensor(name)

    def memory(self, name: str) -> Hashable:
        """Return equal values for tied tensors, and None for one that cannot be tied."""
        home = self._homes[name]
        return home.memory(name) if isinstance(home, _TorchFile) else None


def file_in(path: Path) -> Path:
    """Return the file to read: in a directory, that of transformers, diffusers or peft, or the only one.

    Raises:
        FileNotFoundError: If a directory has no checkpoint.
        FileError: If it has several, and it is not clear which one is meant.
    """
    if not path.is_dir():
        return path
    known = [[path / name for name in names if (path / name).exists()] for names in _IN_DIRECTORIES]
    candidates = [files[0] for files in known if files]
    if not candidates:
        candidates = sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES and f.is_file())
    if not candidates:
        names = ", ".join(names[1] for names in _IN_DIRECTORIES)
        raise FileNotFoundError(f"{path} is a directory without {names} or one *.pt file")
    if len(candidates) > 1:
        names = ", ".join(file.name for file in candidates)
        raise FileError(f"{path} has {len(candidates)} checkpoints, name one of them: {names}")
    return candidates[0]


class _TorchFile:
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, path: Path, key: str | None) -> None:
        content, self._checksums = read_mapped(path)
        self.versions, self._tensors = state_dict_at(content, path, key)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: str(tensor.dtype)[6:] for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        self._checksums.check(name, self._tensors[name])
        return self._tensors[name]

    def memory(self, name: str) -> Hashable:
        tensor = self._tensors[name]
        place = id(self), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        return place if tensor.numel() else None


def shards_of(index: Path) -> dict[Path, list[str]]:
    """Return the names in each file that an index lists."""
    with open_regular(index) as descriptor:
        content = read_some(descriptor, 0, _MOST_INDEX)
    check_json(content, index, SHARDED)
    shards: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(content)["weight_map"].items():
            shards.setdefault(index.with_name(file), []).append(name)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{index} is corrupt: {error!r}", SHARDED) from error
    return shards


def state_dict_at(
    found: Any, path: Path, key: str | None
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the versions of modules and the tensors at a key of a file's content.

    Raises:
        FileError: There is no state dict at the key, or an entry is not a tensor with plain memory.
    """
    part = ""
    try:
        for part in key.split(".") if key else ():
            found = found[int(part)] if isinstance(found, Sequence) else found[part]
    except (KeyError, IndexError, TypeError, ValueError):
        raise FileError(f"{path} has no {part!r} on the way to the key {key!r}") from None
    if not isinstance(found, Mapping):
        raise FileError(f"{path} holds {type(found).__name__}, not a state dict")
    # Attributes from the file may hide methods of dicts and tensors.
    entries = dict(dict.items(found) if isinstance(found, dict) else found.items())
    for name, value in entries.items():
        if problem := _problem_of(name, value):
            inside = [str(part) for part, value in entries.items() if isinstance(value, Mapping)]
            help_ = f"; choose a key: {', '.join(inside)}" if inside else ""
            raise FileError(f"{path}: {name!r} is {problem}{help_}")
    versions = getattr(found, "_metadata", {})
    tensors = {name: Tensor.detach(value) for name, value in entries.items()}
    return versions if isinstance(versions, Mapping) else {}, tensors


def _problem_of(name: object, value: object) -> str | None:
    """Return why an entry cannot be averaged, or None."""
    if not isinstance(value, Tensor):
        return f"not a tensor but {type(value).__name__}"
    if not isinstance(name, str):
        return "not the name of a tensor"
    plain = value.layout == torch.strided and value.dtype is not _FLOAT4
    if not plain or value.is_quantized or value.is_nested:
        return "a tensor without plain memory (sparse, quantized, nested or float4)"
    if min(value.shape, default=0) < 0:
        return "a tensor with a negative dimension"
    if value.is_meta:
        return "a tensor without values, on the device meta"
    # An expanded tensor has more elements than the file.
    size = Tensor.numel(value) * value.dtype.itemsize
    if size > max(Tensor.untyped_storage(value).nbytes(), _MOST_EXPANDED):
        return "a tensor that is far larger than its storage"
    return None
