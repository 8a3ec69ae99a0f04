"""Checkpoint files: their average, and what is in one of them."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modkit.averaging.named_tensors import check_match, is_averaged
from modkit.averaging.precision import kept_dtype
from modkit.averaging.state import recognise
from modkit.files.checkpoint_files import Checkpoint, dtype_name, file_in, is_safetensors
from modkit.files.safetensors_files import library
from modkit.files.torch_files import load_plain


__all__ = ["average_checkpoints"]


@torch.no_grad()
def average_checkpoints(
    paths: Iterable[str | os.PathLike[str]],
    weights: Sequence[float] | None = None,
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[float], object] | None = None,
) -> dict[str, Tensor]:
    """Return the weighted average of checkpoints: a model soup, or the last checkpoints of a run.

    The files are read one after the other: memory holds the sum and one checkpoint. All names and
    shapes are compared before the first tensor is read. Sums are kept in float32 or wider. Integer and
    boolean tensors are those of the last file.

    Sources: https://arxiv.org/abs/2203.05482 (model soups), https://arxiv.org/abs/2209.14981 (LAWA).

    Args:
        paths: Files of ``torch.save`` (loaded with ``weights_only=True``), ``.safetensors`` files, the
            ``.index.json`` of a sharded checkpoint of either kind, or directories written by
            transformers.
        weights: The weight of each file, normalized by their sum. Default: equal weights.
        key: The path of the state dict in a torch file, as ``"model"`` or ``"ema.averages.0.tensors"``.
        dtype: The dtype of the averages. Default: the dtype of each tensor in the first file. A real
            dtype is not applied to complex tensors, nor a complex one to real tensors.
        device: The device on which the sums are kept.
        progress: Called after each tensor with the fraction of all tensors that has been read.

    Returns:
        The averages by name, in the order of the first file. ``load_state_dict`` takes them. Names that
        are tied in all files share one tensor.

    Raises:
        TypeError: If ``paths`` is a single path.
        FileNotFoundError: If a file is missing.
        NameMismatchError: If a file does not have the names and shapes of the first one.
        ValueError: If there is no file, a file cannot be read or holds something other than tensors, a
            tensor does not match its checksum in a torch file, a tensor has integers in one file and
            floats in another, a value is too large for the dtype, or the weights are not one per file,
            finite, and positive in sum.

    Example:
        >>> import tempfile, pathlib, torch
        >>> from modkit import average_checkpoints
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     paths = [pathlib.Path(directory, f"{value}.pt") for value in (1.0, 2.0)]
        ...     for path in paths:
        ...         torch.save({"model": {"weight": torch.tensor([float(path.stem)])}}, path)
        ...     average_checkpoints(paths, weights=[3, 1], key="model")
        {'weight': tensor([1.2500])}
    """
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"average_checkpoints: paths must be a list of files, got {paths!r}")
    files = [Path(path) for path in paths]
    if not files:
        raise ValueError("average_checkpoints: there is no file to average")
    shares = _checked_weights(weights, len(files))
    first = _Facts.of(Checkpoint(files[0], key))
    ties = first.ties.intersection(*(_ties(_fitting(path, key, first)) for path in files[1:]))
    second_names = dict(ties)
    names = [name for name in first.shapes if name not in second_names]
    averages: dict[str, Tensor] = {}
    total = 0.0
    for index, (path, share) in enumerate(zip(files, shares, strict=True)):
        total += share
        # A running mean is exact for equal values, where a sum of parts is not.
        part = share / total if total else 0.0
        # Compared again: a running training job may have replaced the file since.
        checkpoint = _fitting(path, key, first)
        for done, name in enumerate(names, 1):
            _take_in(checkpoint.tensor(name), name, averages, part, device)
            if progress is not None:
                progress((index + done / len(names)) / len(files))
        # Before the next one is opened.
        del checkpoint
    for name in names:
        # One at a time: the averages are not all in memory in two dtypes.
        averages[name] = _finished(name, averages[name], first.dtypes[name], dtype)
    found = {name: averages[second_names.get(name, name)] for name in first.shapes}
    return _with_versions(found, first.versions)


@dataclass(frozen=True)
class _Facts:
    """The metadata of a file, which outlives the open file."""

    path: Path
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, str]
    versions: Mapping[str, Any]
    ties: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, found: Checkpoint) -> "_Facts":
        return cls(found.path, found.shapes, found.dtypes, found.versions, _ties(found))


def _fitting(path: Path, key: str | None, first: _Facts) -> Checkpoint:
    """Open a file, and raise if it does not have the names, shapes and kinds of the first one."""
    found = Checkpoint(path, key)
    check_match(f"{path} does not fit {first.path}", first.shapes, found.shapes)
    for name, own in first.dtypes.items():
        if _is_averaged(own) != _is_averaged(found.dtypes[name]):
            raise ValueError(
                f"{path}: {name} is torch.{found.dtypes[name]}, and torch.{own} in the first file"
            )
    return found


def _is_averaged(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _ties(checkpoint: Checkpoint) -> frozenset[tuple[str, str]]:
    """Return each name whose tensor has an earlier name, with that name."""
    met: dict[Hashable, str] = {}
    ties: set[tuple[str, str]] = set()
    for name in checkpoint.shapes:
        memory = checkpoint.memory(name)
        if memory is not None and met.setdefault(memory, name) != name:
            ties.add((name, met[memory]))
    return frozenset(ties)


def _with_versions(found: dict[str, Tensor], versions: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors with the module versions of ``state_dict()``, if the first file has them.

    Some modules, torchvision's MNASNet for instance, refuse to load a state without its version.
    """
    if not versions:
        return found
    state = OrderedDict(found)
    state._metadata = dict(versions)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return state


def _checked_weights(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ValueError(f"average_checkpoints: {len(weights)} weights for {count} files")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(
            f"average_checkpoints: weights must be finite, 0 or more, and not all 0, got {weights!r}"
        )
    return weights


def _take_in(
    tensor: Tensor,
    name: str,
    averages: dict[str, Tensor],
    part: float,
    device: str | torch.device,
) -> None:
    if not is_averaged(tensor) or part == 1.0:
        wide = kept_dtype(tensor.dtype, "fp32")
        averages[name] = tensor.to(device, wide, copy=True)
    elif part:
        averages[name].lerp_(tensor.to(device, averages[name].dtype), part)


def _finished(name: str, average: Tensor, first: str, dtype: torch.dtype | None) -> Tensor:
    """Cast an average to its final dtype; raise if that makes a finite value infinite."""
    if not is_averaged(average):
        return average
    if dtype is None or dtype.is_complex != average.is_complex():
        dtype = getattr(torch, first)
        assert isinstance(dtype, torch.dtype)
    found = average.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(average.dtype).max:
        lost = average.isfinite() & ~found.to(average.dtype).isfinite()
        if lost.any():
            raise ValueError(f"{name} has the value {average[lost][0]}, too large for {dtype}")
    return found


@dataclass(frozen=True)
class Entry:
    """One tensor: its name, its shape, its dtype and its size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Group:
    """The tensors directly under one key of a checkpoint.

    Args:
        key: The names on the way to the tensors, joined by dots; empty for the file itself.
        owner: The library whose averages these are, or None if unknown.
        entries: The tensors.
        averageable: True if the key holds nothing else, so that ``key=`` may name it.
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
    """Everything in a checkpoint.

    Args:
        container: The kind of file: ``"torch"``, ``"safetensors"`` or ``"shards"``.
        groups: The tensors, by key.
        facts: All other entries: the key and the value as text.
    """

    container: str
    groups: tuple[Group, ...]
    facts: tuple[tuple[str, str], ...]


def contents(path: Path) -> Contents:
    """List what is in a checkpoint, without reading tensor data and without executing code.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read as a checkpoint.
    """
    file = file_in(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there")
    if is_safetensors(file):
        return _safetensors(file)
    if file.name.endswith(".index.json"):
        found = Checkpoint(file, None)
        return _flat("shards", ((n, found.shapes[n], found.dtypes[n]) for n in found.shapes))
    parts = list(_walk(load_plain(file), ""))
    groups = tuple(part for part in parts if isinstance(part, Group))
    return Contents("torch", groups, tuple(part for part in parts if not isinstance(part, Group)))


def _safetensors(file: Path) -> Contents:
    try:
        with library("safetensors").safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - no mapping
            facts = tuple((opened.metadata() or {}).items())
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a checkpoint: {error}") from error
    listed = ((name, found.get_shape(), found.get_dtype()) for name, found in slices)
    return _flat("safetensors", listed, facts)


def _flat(
    container: str,
    listed: Iterable[tuple[str, Iterable[int], str]],
    facts: tuple[tuple[str, str], ...] = (),
) -> Contents:
    """Return the contents of a checkpoint that has nothing but tensors: names, shapes and dtypes."""
    entries: list[Entry] = []
    for name, lengths, dtype in listed:
        shape = tuple(lengths)
        # F8_E4M3 and float8_e4m3fn both have 8 bits; booleans have no number, and take a byte.
        bits = "".join(filter(str.isdigit, dtype.partition("_")[0])) or "8"
        entries.append(Entry(name, shape, dtype, math.prod(shape) * int(bits) // 8))
    return Contents(container, (Group("", None, tuple(entries), averageable=True),), facts)


def _entries(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name, tuple(tensor.shape), dtype_name(tensor), tensor.nbytes)
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
