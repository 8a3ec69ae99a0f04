"""The tensors of a checkpoint, one at a time: torch or safetensors files, shards, or a folder."""

import argparse
import difflib
import json
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from modkit.errors import FileError, printable, shown
from modkit.files import kinds
from modkit.files.distributed_files import METADATA, DistributedFile
from modkit.files.inert import Constant, Foreign, InertTensor, Stored
from modkit.files.kinds import SHARDED
from modkit.files.safetensors_files import SafetensorsFile, plain_metadata
from modkit.files.torch_files import TorchFile
from modkit.files.zip_archive import open_kept, open_regular, read_some


if TYPE_CHECKING:
    import torch

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
_MOST_EXPANDED: Final = 1 << 30
MAX_NAME: Final = 1000  # the characters of a name in a listing
# A hostile file can name one object a billion times. Each listed entry costs its name and 64.
_BUDGET: Final = 1 << 26
_DEEPEST: Final = 16
_MOST_KEYS: Final = 10
# The placeholders, as users know them.
_KINDS: Final[dict[type, str]] = {InertTensor: "a tensor", Constant: "a dtype", Stored: "a storage"}


class StateDictFile:
    """The state dict at a key of a file of torch, which stays open.

    Args:
        path: The file.
        key: The key of the state dict; see :class:`Checkpoint`.
        prefix: Entries whose names do not begin with it may be anything.

    Attributes:
        tensors: The tensors of the state dict by description.
    """

    metadata: Mapping[str, str] = {}

    def __init__(self, path: Path, key: str | None, prefix: str = "") -> None:
        self._file = TorchFile(open_kept(self, path), str(path))
        self.unverified: bool = not self._file.has_checksums
        self.versions, self.tensors = state_dict_at(self._file.content.value, path, key, prefix)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> "torch.Tensor":
        """Return a tensor, verified if the file has checksums."""
        return self._file.tensor(self.tensors[name])


def content_of_file(path: Path) -> Any:
    """Return the content of a file of torch, with tensors by description."""
    with open_regular(path) as descriptor:
        return TorchFile(descriptor, str(path)).content.value


_Home: TypeAlias = StateDictFile | SafetensorsFile | DistributedFile


def _opened(path: Path, key: str | None, prefix: str) -> _Home:
    """Open a file by its content, whatever its name ends in."""
    if path.name == METADATA:
        return DistributedFile(path, key)
    with open_regular(path) as descriptor:
        kind = kinds.kind_of(descriptor)
        if kind not in {kinds.SAFETENSORS, kinds.TORCH_SAVE, kinds.LEGACY}:
            raise kinds.wrong_kind(descriptor, str(path), "a checkpoint of torch or safetensors")
    return SafetensorsFile(path) if kind == kinds.SAFETENSORS else StateDictFile(path, key, prefix)


class Checkpoint:
    """The tensors of one checkpoint by name, in one or several files.

    Opening reads names and shapes. Tensors are read one at a time, and only the last one is kept;
    those of torch files are verified then. Safetensors files have no checksums.

    Args:
        paths: A file, an index of shards, or a directory; see :func:`file_in`. Several of them are
            the parts of one checkpoint.
        key: The key of the state dict in files of torch, with dots between the keys of nested
            dicts; None for the whole file.
        prefix: Only tensors whose names begin with it.

    Attributes:
        files: The files that are read: one, or all shards.
        tensors: The tensors by description.
        shapes: The shape of each tensor.
        dtypes: The dtype of each tensor, such as ``"float32"``.
        versions: The ``_metadata`` of the state dict.
        metadata: The metadata of safetensors files.
        unverified: The files of torch without checksums.
        unlisted: The number of tensors in shards that their index does not name.

    Raises:
        FileNotFoundError: If the file or one of its shards is missing.
        FileError: If a file is corrupt, has no state dict at the key, has no tensor with the
            prefix, or lacks a tensor of the index.
        ValueError: If two of several paths have a tensor of the same name.
    """

    def __init__(self, *paths: Path, key: str | None = None, prefix: str = "") -> None:
        self._homes: dict[str, _Home] = {}
        self.files: list[Path] = []
        self.versions: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self.unverified: list[Path] = []
        self.unlisted: int = 0
        for path in paths:
            self._add(file_in(path), path, key, prefix)

        if not self._homes:
            raise FileError(f"{paths[0]} holds no tensors")
        first = min(self._homes)
        self._homes = {name: home for name, home in self._homes.items() if name.startswith(prefix)}
        if not self._homes:
            raise FileError(f"{paths[0]}: no name begins with {prefix!r}; the first is {first!r}")
        self.tensors = {name: home.tensors[name] for name, home in self._homes.items()}
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}

    def _add(self, file: Path, path: Path, key: str | None, prefix: str) -> None:
        is_index = file.name.endswith(INDEX)
        shards: Mapping[Path, list[str] | None] = shards_of(file) if is_index else {file: None}
        for shard, names in shards.items():
            # False also for a name that no file can have, where Path.exists() raises.
            if names and not os.path.exists(shard):  # noqa: PTH110
                raise FileNotFoundError(shown(f"{shard} is missing; {file} lists {names[0]} in it"))
            opened = _opened(shard, key, prefix)
            if absent := [name for name in names or () if name not in opened.tensors]:
                raise FileError(f"{shard} has no {absent[0]}, which {file} lists in it", SHARDED)

            added = names or opened.tensors
            if repeated := [name for name in added if name in self._homes]:
                raise ValueError(shown(f"{repeated[0]} is in {path} and in a file before it"))
            self._homes |= dict.fromkeys(added, opened)
            self.unlisted += len(opened.tensors) - len(added)
            self.versions |= opened.versions
            self.metadata |= opened.metadata
            self.files += opened.files if isinstance(opened, DistributedFile) else [shard]
            if opened.unverified:
                self.unverified.append(shard)

    def dtype(self, name: str) -> "torch.dtype":
        """Return the dtype of a tensor; raise FileError if this torch does not have it."""
        import torch

        dtype = getattr(torch, self.dtypes[name], None)
        if not isinstance(dtype, torch.dtype):
            raise FileError(f"{name} is {self.dtypes[name]}, which this torch does not support")
        return dtype

    def tensor(self, name: str) -> "torch.Tensor":
        """Return one tensor, verified.

        Args:
            name: Name of the tensor.

        Raises:
            FileError: If its content is corrupt.
        """
        return self._homes[name].tensor(name)

    def memory(self, name: str) -> Hashable:
        """Return equal values for tied tensors, and None for one that cannot be tied."""
        tensor = self.tensors[name]
        if not tensor.nbytes or tensor.storage is None:
            return None
        # The same memory has other values in a lazy view, such as tensor.conj().
        layout = tensor.shape, tensor.stride, tensor.dtype, tensor.bits
        return id(self._homes[name]), tensor.storage, tensor.offset, *layout


def file_in(path: Path) -> Path:
    """Return the file to read.

    Args:
        path: A file, or a directory: there, it is the file that transformers, diffusers or peft
            reads, the metadata of a distributed checkpoint, or the only one.

    Raises:
        FileNotFoundError: If a directory has no checkpoint.
        FileError: If it has several, and it is not clear which one is meant.
    """
    if not path.is_dir():
        return path
    if (path / METADATA).is_file():
        return path / METADATA

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
        content = read_some(descriptor, 0, kinds.MOST_JSON)
    shards: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(content)["weight_map"].items():
            shards.setdefault(index.with_name(file), []).append(name)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{index} is corrupt: {error!r}", SHARDED) from error
    return shards


@dataclass
class Listing:
    """The content of a file by the keys that lead there, up to a budget.

    Attributes:
        tensors: The tensors by name; keys of nested dicts are joined by dots.
        entries: Other entries, with a shortened ``repr``.
        groups: The names directly under each key, ``""`` for the whole file.
        containers: The object with these entries.
        is_cut: Whether the file has more entries than the budget.
    """

    tensors: dict[str, InertTensor] = field(default_factory=dict[str, InertTensor])
    entries: dict[str, str] = field(default_factory=dict[str, str])
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    containers: dict[str, object] = field(default_factory=dict[str, object])
    is_cut: bool = False

    def tensor_keys(self) -> list[str]:
        """Return the keys below which there are tensors only."""
        found: list[str] = []
        for key, names in self.groups.items():
            prefix = f"{key}." if key else ""
            if names and all(prefix + name in self.tensors for name in names):
                found.append(key)
        return found


def listing_of(content: object) -> Listing:
    """Return what nested mappings and lists hold."""
    listing = Listing()
    left = _BUDGET
    # The containers around an entry: one that contains itself is listed once.
    around: set[int] = set()

    def walk(entry: object, key: str, depth: int) -> None:
        nonlocal left
        if isinstance(entry, InertTensor):
            listing.tensors[key] = entry
            return
        ends = depth > _DEEPEST or id(entry) in around
        items = None if ends else named_entries(entry)
        if items is None:
            listing.entries[key] = short_repr(entry)
            return

        names: list[str] = []
        listing.groups[key] = ()
        listing.containers.setdefault(key, entry)
        around.add(id(entry))
        for name, value in items:
            left -= 64 + len(key) + len(name)
            if left < 0:
                break
            names.append(name)
            walk(value, f"{key}.{name}" if key else name, depth + 1)
        around.discard(id(entry))
        listing.groups[key] = tuple(names)

    walk(content, "", 0)
    listing.is_cut = left < 0
    return listing


def named_entries(entry: object) -> Iterable[tuple[str, object]] | None:
    """Return the entries of a container, each with its part of the key that `inspect` shows.

    Args:
        entry: An object of a file.

    Returns:
        The entries of a mapping, of a namespace or another object, or of a list that begins with
        tensors or mappings; None for another object.
    """
    entry = _without_class(entry)
    if isinstance(entry, dict):
        # An attribute from the file may hide the method.
        pairs = dict.items(cast("dict[object, object]", entry))
        return ((n[:MAX_NAME] if isinstance(n, str) else short_repr(n), v) for n, v in pairs)
    if isinstance(entry, (list, tuple)):
        values = cast("Sequence[object]", entry)
        if any(isinstance(value, (InertTensor, dict, Foreign)) for value in islice(values, 100)):
            return ((str(index), value) for index, value in enumerate(values))
    return None


def _without_class(entry: object) -> object:
    """Return the entries of a namespace or of another object; other values as they are."""
    if isinstance(entry, argparse.Namespace):
        return vars(entry)
    return (entry.entries() or None) if isinstance(entry, Foreign) else entry


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
    if isinstance(value, (str, bytes)) and not isinstance(value, Constant):
        return printable(repr(value[:60]) + ("..." if len(value) > 60 else ""))
    small = isinstance(value, int) and value.bit_length() <= 256
    if small or value is None or isinstance(value, (float, complex, Constant)):
        return printable(repr(value))
    return printable(_kind_of(value)[:MAX_NAME].removeprefix("builtins."))


def _kind_of(value: object) -> str:
    """Return the name of the class of an object of a file, or of a class in it."""
    name = getattr(value, "name", "") if isinstance(value, (Foreign, type)) else ""
    return str(name) or _KINDS.get(type(value), type(value).__name__)


def state_dict_at(
    content: object, path: Path, key: str | None, prefix: str
) -> tuple[Mapping[str, Any], dict[str, InertTensor]]:
    """Return the versions of modules and the tensors at a key of a file's content.

    Args:
        content: The content of the file.
        path: The file, for errors.
        key: The key as `inspect` shows it, with dots between the names of nested dicts and lists;
            None for the whole content.
        prefix: Other entries, whose names do not begin with it, may be anything.

    Raises:
        FileError: If there is no state dict at the key, or an entry is not a tensor with plain
            memory. It names the keys that lead to tensors.
    """
    listing = listing_of(content)
    keys = listing.tensor_keys()
    if key and key not in listing.containers:
        near = difflib.get_close_matches(key, keys, _MOST_KEYS) or keys
        raise FileError(f"{path} has no state dict at the key {key!r}" + _advice(near))
    state_dict = listing.containers[key] if key else content

    entries = _without_class(state_dict)
    if not isinstance(entries, dict):
        raise FileError(f"{path} holds {_kind_of(state_dict)}, not a state dict")

    # Attributes from the file may hide methods of dicts.
    tensors: dict[str, InertTensor] = {}
    for name, value in dict.items(entries):
        problem = _problem_of(name, value)
        if problem and str(name).startswith(prefix):
            below = [inner for inner in keys if not key or inner.startswith(f"{key}.")]
            raise FileError(f"{path}: {name!r} is {problem}" + _advice(below))
        if not problem:
            tensors[name] = value
    return plain_metadata(getattr(state_dict, "_metadata", None)), tensors


def _advice(keys: Sequence[str]) -> str:
    """Return the end of an error: the keys to choose from."""
    if not keys or "" in keys:
        return "; it needs no key" if keys else "; no key leads to tensors only"
    return f"; choose a key: {', '.join(keys[:_MOST_KEYS])}"


def _problem_of(name: object, value: object) -> str | None:
    """Return why an entry cannot be averaged, or None."""
    if not isinstance(value, InertTensor):
        kind = _kind_of(value)
        is_made = kind.startswith("torch._utils._rebuild")
        return f"a tensor without plain memory ({kind})" if is_made else f"not a tensor but {kind}"
    if not isinstance(name, str):
        return "not the name of a tensor"
    if value.dtype == "float4_e2m1fn_x2":
        return "a tensor without plain memory (float4)"
    # An expanded tensor has more elements than the file.
    assert value.storage is not None
    if value.nbytes > max(value.storage.nbytes, _MOST_EXPANDED):
        return "a tensor that is far larger than its storage"
    return None
