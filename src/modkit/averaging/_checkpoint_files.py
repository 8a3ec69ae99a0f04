"""The tensors in a checkpoint, one at a time and with nothing run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from modkit.averaging._snapshots import library


_INDEX = ".safetensors.index.json"


class Checkpoint:
    """A file of tensors: of torch, of safetensors, or the index of a sharded one.

    Only names and shapes are read at first; torch's files are mapped into memory.

    Args:
        path: The file.
        key: Where in a file of torch the state dict is, with dots between nested names.

    Raises:
        FileNotFoundError: There is no such file, or a shard is missing.
        ValueError: It cannot be read as a checkpoint, or holds something other than tensors.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._tensors: Mapping[str, Tensor] = {}
        self.shapes: dict[str, torch.Size]
        try:
            if path.name.endswith((".safetensors", _INDEX)):
                self._open_safetensors()
            else:
                self._tensors = _state_dict_in(path, key)
                self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        except (FileNotFoundError, ImportError, _NoTensorsError):
            raise
        except Exception as error:
            raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error
        if not self.shapes:
            raise ValueError(f"{path} holds no tensors")

    def _open_safetensors(self) -> None:
        safe_open = library("safetensors").safe_open
        shards = [self.path]
        if self.path.name.endswith(_INDEX):
            names = set(json.loads(self.path.read_text())["weight_map"].values())
            shards = [self.path.with_name(name) for name in sorted(names)]
        for shard in shards:
            file = safe_open(shard, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        self.shapes = {
            name: torch.Size(file.get_slice(name).get_shape()) for name, file in self._files.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        if name in self._files:
            return cast("Tensor", self._files[name].get_tensor(name))
        return self._tensors[name]


class _NoTensorsError(ValueError):
    """Something in a checkpoint is not a tensor; the message says what."""


def _state_dict_in(path: Path, key: str | None) -> dict[str, Tensor]:
    found: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for part in key.split(".") if key else ():
        if not isinstance(found, Mapping) or part not in found:
            raise _NoTensorsError(f"{path} has no {part!r} on the way to key={key!r}")
        found = cast("Mapping[str, Any]", found)[part]
    if not isinstance(found, Mapping):
        raise _NoTensorsError(f"{path} holds no state dict but {type(found).__name__}")
    entries = cast("Mapping[str, Any]", found)
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            inside = [part for part, value in entries.items() if isinstance(value, Mapping)]
            help_ = f"; key= may be one of {', '.join(inside)}" if inside else ""
            raise _NoTensorsError(
                f"{path}: {name!r} is no tensor but {type(value).__name__}{help_}"
            )
    return dict(entries)
