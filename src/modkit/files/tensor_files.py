"""The tensors of a checkpoint, one at a time: torch or safetensors files, or shards."""

import argparse
import json
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor

from modkit.errors import FileError, printable, shown
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
MAX_NAME: Final = 1000  # the characters of a name in a listing
_STATE_DICTS: Final = (Mapping, argparse.Namespace)
# torch, which has it since 2.8, copies no tensors of this dtype.
_FLOAT4: Final = getattr(torch, "float4_e2m1fn_x2", None)


class Checkpoint:
    """The tensors of a checkpoint by name.

    Opening reads names and shapes. Tensors of torch files are verified when they are read;
    safetensors files have no checksums.

    Args:
        path: A file, an index of shards, or a directory; see :func:`file_in`.
        key: The key of the state dict in files of torch, with dots between the keys of nested
            dicts; None for the whole file.
        prefix: Only tensors whose names begin with it.

    Attributes:
        files: The files that are read: one, or all shards.
        shapes: The shape of each tensor.
        dtypes: The dtype of each tensor, such as ``"float32"``.
        versions: The ``_metadata`` of the state dict.
        metadata: The metadata of safetensors files.

    Raises:
        FileNotFoundError: If the file or one of its shards is missing.
        FileError: If a file is corrupt, has no state dict at the key, has no tensor with the
            prefix, or lacks a tensor of the index.
        ImportError: If a safetensors file is read without the package safetensors.
    """

    def __init__(self, path: Path, key: str | None, prefix: str = "") -> None:
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
                raise FileNotFoundError(shown(f"{shard} is missing; {file} lists {names[0]} in it"))
            is_safetensors = shard.suffix == ".safetensors"
            opened = SafetensorsFile(shard) if is_safetensors else _TorchFile(shard, key)
            if absent := [name for name in names or () if name not in opened.shapes]:
                raise FileError(f"{shard} has no {absent[0]}, which {file} lists in it", SHARDED)
            self._homes |= dict.fromkeys(names or opened.shapes, opened)
            self.versions = {**self.versions, **opened.versions}
            self.metadata = {**self.metadata, **opened.metadata}

        if not self._homes:
            raise FileError(f"{path} holds no tensors")
        first_name = min(self._homes)
        self._homes = {name: home for name, home in self._homes.items() if name.startswith(prefix)}
        if not self._homes:
            raise FileError(f"{path}: no name begins with {prefix!r}; the first is {first_name!r}")
        self.shapes: dict[str, torch.Size] = {
            name: home.shapes[name] for name, home in self._homes.items()
        }
        self.dtypes: dict[str, str] = {
            name: home.dtypes[name] for name, home in self._homes.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, verified.

        Args:
            name: Name of the tensor.

        Raises:
            FileError: If its content is corrupt.
        """
        return self._homes[name].tensor(name)

    def memory(self, name: str) -> Hashable:
        """Return equal values for tied tensors, and None for one that cannot be tied."""
        home = self._homes[name]
        return home.memory(name) if isinstance(home, _TorchFile) else None


def file_in(path: Path) -> Path:
    """Return the file to read.

    Args:
        path: A file, or a directory: there, it is the file that transformers, diffusers or peft
            reads, or the only one.

    Raises:
        FileNotFoundError: If a directory has no checkpoint.
        FileError: If it has several, and it is not clear which one is meant.
    """
    if not path.is_dir():
        return path

    by_library = [
        [path / name for name in names if (path / name).exists()] for names in _IN_DIRECTORIES
    ]
    candidates = [files[0] for files in by_library if files]
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
        if not tensor.numel():
            return None
        layout = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        # The same memory has other values in a lazy view, such as tensor.conj().
        return id(self), *layout, tensor.is_conj(), tensor.is_neg()


def shards_of(index: Path) -> dict[Path, list[str]]:
    """Return the names in each file that an index lists.

    Args:
        index: Path of the ``.index.json``.

    Returns:
        The names of tensors by the path of their file.

    Raises:
        FileError: If the index is corrupt, or not one that a library writes.
    """
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


def named_entries(entry: object) -> Iterable[tuple[str, object]] | None:
    """Return the entries of a container, each with its part of the key that `inspect` shows.

    Args:
        entry: An object of a file.

    Returns:
        The entries of a mapping, a namespace, or a list that begins with tensors or mappings; None
        for another object.
    """
    if isinstance(entry, argparse.Namespace):
        entry = vars(entry)
    if isinstance(entry, Mapping):
        entries = cast("Mapping[object, object]", entry)
        # An attribute from the file may hide the method.
        pairs = dict.items(entry) if isinstance(entry, dict) else entries.items()
        return ((n[:MAX_NAME] if isinstance(n, str) else short_repr(n), v) for n, v in pairs)
    if isinstance(entry, (list, tuple)):
        values = cast("Sequence[object]", entry)
        if any(isinstance(value, (Tensor, Mapping)) for value in islice(values, 100)):
            return ((str(index), value) for index, value in enumerate(values))
    return None


def short_repr(value: object, *, nested: bool = False) -> str:
    """Return a ``repr`` of bounded length and cost.

    Args:
        value: An object of a file.
        nested: Whether it is in a list, of which only the first level is shown.
    """
    if isinstance(value, (list, tuple)) and not nested:
        values = cast("Sequence[object]", value)
        items = [short_repr(item, nested=True) for item in values[:8]]
        if len(values) > len(items):
            items.append("...")
        joined = ", ".join(items)
        return f"[{joined}]" if isinstance(value, list) else f"({joined})"
    if isinstance(value, (str, bytes)):
        return printable(repr(value[:60]) + ("..." if len(value) > 60 else ""))
    small = isinstance(value, int) and value.bit_length() <= 256
    if small or value is None or isinstance(value, (float, complex, torch.dtype, torch.device)):
        return repr(value)
    return type(value).__name__


def _entry_at(content: object, key: str) -> object:
    """Return the entry that a key leads to; any name on the way may have dots.

    Raises:
        LookupError: If there is none, with the first name that is absent.
    """
    shortest_rest = key
    unvisited = [(content, key)]
    # A file may have an object in many places, also within itself.
    visited: set[tuple[int, str]] = set()
    while unvisited:
        container, rest = unvisited.pop()
        shortest_rest = min(shortest_rest, rest, key=len)
        for name, value in named_entries(container) or ():
            if name == rest:
                return value
            inner_rest = rest.removeprefix(f"{name}.")
            if inner_rest != rest and (id(value), inner_rest) not in visited:
                visited.add((id(value), inner_rest))
                unvisited.append((value, inner_rest))
    raise LookupError(shortest_rest.partition(".")[0])


def state_dict_at(
    content: Any, path: Path, key: str | None
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the versions of modules and the tensors at a key of a file's content.

    Args:
        content: The content of the file.
        path: The file, for errors.
        key: The key as `inspect` shows it, with dots between the names of nested dicts and lists;
            None for the whole content.

    Raises:
        FileError: If there is no state dict at the key, or an entry is not a tensor with plain
            memory.
    """
    try:
        state_dict = _entry_at(content, key) if key else content
    except LookupError as error:
        raise FileError(f"{path} has no {error.args[0]!r} on the way to the key {key!r}") from None
    if isinstance(state_dict, argparse.Namespace):
        state_dict = vars(state_dict)
    if not isinstance(state_dict, Mapping):
        raise FileError(f"{path} holds {type(state_dict).__name__}, not a state dict")

    # Attributes from the file may hide methods of dicts and tensors.
    items = dict.items(state_dict) if isinstance(state_dict, dict) else state_dict.items()
    entries = dict(items)
    for name, value in entries.items():
        if problem := _problem_of(name, value):
            above = f"{key}." if key else ""
            inner = named_entries(state_dict) or ()
            keys = [above + name for name, value in inner if isinstance(value, _STATE_DICTS)]
            advice = f"; choose a key: {', '.join(keys)}" if keys else ""
            raise FileError(f"{path}: {name!r} is {problem}{advice}")

    versions = getattr(state_dict, "_metadata", {})
    tensors = {name: Tensor.detach(value) for name, value in entries.items()}
    return versions if isinstance(versions, Mapping) else {}, tensors


def _problem_of(name: object, value: object) -> str | None:
    """Return why an entry cannot be averaged, or None."""
    if not isinstance(value, Tensor):
        return f"not a tensor but {type(value).__name__}"
    if not isinstance(name, str):
        return "not the name of a tensor"

    is_plain = value.layout == torch.strided and value.dtype is not _FLOAT4
    if not is_plain or value.is_quantized or value.is_nested:
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
