"""What is in a checkpoint: which state dicts, under which keys, and whose they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modkit._files import library
from modkit.averaging._checkpoint_files import Checkpoint, file_in, is_safetensors
from modkit.averaging._torch_files import load_plain
from modkit.averaging.state import recognise


@dataclass(frozen=True)
class Entry:
    """One tensor: its name, its shape, its dtype and its size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Group:
    """Tensors that stand together under one key.

    Args:
        key: With dots between nested names; empty for the file itself.
        owner: Which library's averages these are, if that is known.
        entries: The tensors.
        averageable: Whether there is nothing else under the key, so that ``key=`` may name it.
    """

    key: str
    owner: str | None
    entries: tuple[Entry, ...]
    averageable: bool

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds.

    Args:
        container: What kind of file it is.
        groups: The tensors, by the key under which they stand.
        facts: Everything else: the key and the value as text.
    """

    container: str
    groups: tuple[Group, ...]
    facts: tuple[tuple[str, str], ...]


def contents(path: Path) -> Contents:
    """Read what is in a checkpoint, without reading the values of tensors and without running anything.

    Raises:
        FileNotFoundError: It is not there.
        ValueError: It cannot be read as a checkpoint.
    """
    file = file_in(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there")
    if is_safetensors(file):
        return _safetensors(file)
    if file.name.endswith(".index.json"):
        return _index(file)
    groups: list[Group] = []
    facts: list[tuple[str, str]] = []
    for found in _walk(load_plain(file), ""):
        if isinstance(found, Group):
            groups.append(found)
        else:
            facts.append(found)
    return Contents("torch", tuple(groups), tuple(facts))


def _safetensors(file: Path) -> Contents:
    try:
        with library("safetensors").safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - no mapping
            facts = tuple((opened.metadata() or {}).items())
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a checkpoint: {error}") from error
    entries = [
        Entry(name, tuple(found.get_shape()), found.get_dtype(), _bytes_of(found))
        for name, found in slices
    ]
    group = Group("", None, tuple(entries), averageable=True)
    return Contents("safetensors", (group,), facts)


def _bytes_of(found: Any) -> int:
    bits = "".join(
        character for character in found.get_dtype().split("_")[0] if character.isdigit()
    )
    # The format calls booleans BOOL, and they have a byte.
    return torch.Size(found.get_shape()).numel() * (int(bits) // 8 if bits else 1)


def _index(file: Path) -> Contents:
    checkpoint = Checkpoint(file, None)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    group = Group("", None, _entries(tensors), averageable=True)
    return Contents("shards", (group,), ())


def _entries(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in tensors.items()
    )


def _walk(found: Any, key: str) -> Iterator[Group | tuple[str, str]]:
    """Yield the groups of tensors and the other values below a key."""
    if isinstance(found, Tensor):
        yield Group(key, None, _entries({key.rpartition(".")[2]: found}), averageable=False)
        return
    if isinstance(found, Mapping):
        items = [(str(name), value) for name, value in found.items()]
    elif isinstance(found, Sequence) and any(
        isinstance(value, (Tensor, Mapping)) for value in found
    ):
        items = [(str(index), value) for index, value in enumerate(found)]
    else:
        yield key, repr(found)
        return
    tensors = {name: value for name, value in items if isinstance(value, Tensor)}
    owner = _owner(found)
    if tensors or owner:
        whole = isinstance(found, Mapping) and len(tensors) == len(items)
        yield Group(key, owner, _entries(tensors), averageable=whole)
    for name, value in items:
        if not isinstance(value, Tensor):
            yield from _walk(value, f"{key}.{name}" if key else name)


def _owner(found: Any) -> str | None:
    if not isinstance(found, Mapping):
        return None
    state: Mapping[Any, Any] = found
    if {"version", "step", "averages", "schedules"} <= state.keys():
        return "modkit.EMA"
    if all(isinstance(name, str) for name in state):
        return recognise(state)
    return None
