"""Averages of checkpoints that are on disk already."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modkit.averaging._members import check_match
from modkit.averaging._precision import is_averaged, kept_dtype
from modkit.files.checkpoint_files import Checkpoint


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
    """Return the average of checkpoints: a model soup, or the last checkpoints of one run.

    The files are read one after the other, so that in memory there are the sum and one checkpoint. All
    names and shapes are compared before the first tensor is read. Sums are kept in float32 at least;
    tensors of integers and booleans are those of the last file.

    Sources: https://arxiv.org/abs/2203.05482 (model soups), https://arxiv.org/abs/2209.14981 (LAWA).

    Args:
        paths: Files of ``torch.save`` (loaded with ``weights_only=True``), ``.safetensors``, the
            ``.index.json`` of a sharded checkpoint of either kind, or directories that transformers
            has saved to.
        weights: How much each file counts, in proportion to their sum; by default all the same.
        key: Where in files of torch the state dict is, as ``"model"`` or ``"ema.averages.0.tensors"``.
        dtype: Of the averages; by default each has the dtype that it has in the first file. A real dtype
            is not for complex tensors, nor the other way round.
        device: Where to average.
        progress: Called after each tensor with the part of all tensors that has been read.

    Returns:
        The averages by name, in the order of the first file. ``load_state_dict`` takes them. Names that
        are tied in all files have one tensor.

    Raises:
        TypeError: One path is given in place of a list.
        FileNotFoundError: A file is missing.
        NameMismatchError: A file does not have the names and shapes of the first one.
        ValueError: A file cannot be read or holds something other than tensors, there is none, a
            tensor does not fit the checksum that a file of torch has of it, a tensor is of integers in
            one file and of floats in another, a value is too large for the dtype, or the weights are
            not one for each file, finite, and positive in sum.

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
    ties = first.ties.intersection(
        *(_ties(_fitting(path, key, first), first.shapes) for path in files[1:])
    )
    second_names = dict(ties)
    names = [name for name in first.shapes if name not in second_names]
    averages: dict[str, Tensor] = {}
    total = 0.0
    for index, (path, share) in enumerate(zip(files, shares, strict=True)):
        total += share
        # A mean that moves is exact for equal values, where a sum of parts is not.
        part = share / total if total else 0.0
        # Compared again: somebody may have put another file in its place since.
        checkpoint = _fitting(path, key, first)
        for done, name in enumerate(names, 1):
            _take_in(checkpoint.tensor(name), name, averages, part, device)
            if progress is not None:
                progress((index + done / len(names)) / len(files))
        # Before the next one is opened.
        del checkpoint
    for name in names:
        # One after the other: not all of them need to be there in two dtypes.
        averages[name] = _finished(name, averages[name], first.dtypes[name], dtype)
    found = {name: averages[second_names.get(name, name)] for name in first.shapes}
    return _with_versions(found, first.versions)


@dataclass(frozen=True)
class _Facts:
    """What of a file is looked at again when it is no longer open."""

    path: Path
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, str]
    versions: Mapping[str, Any]
    ties: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, found: Checkpoint) -> "_Facts":
        return cls(
            found.path, found.shapes, found.dtypes, found.versions, _ties(found, found.shapes)
        )


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


def _ties(checkpoint: Checkpoint, names: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Return each name whose tensor has been met under another name before, with that name."""
    met: dict[Hashable, str] = {}
    ties: set[tuple[str, str]] = set()
    for name in names:
        memory = checkpoint.memory(name)
        if memory is not None and met.setdefault(memory, name) != name:
            ties.add((name, met[memory]))
    return frozenset(ties)


def _with_versions(found: dict[str, Tensor], versions: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors as ``state_dict()`` does, if the first file had been made by that.

    Some modules, MNASNet of torchvision for instance, load nothing that does not tell its version.
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
    if not is_averaged(average):
        return average
    if dtype is None or dtype.is_complex != average.is_complex():
        dtype = getattr(torch, first)
        assert isinstance(dtype, torch.dtype)
    return cast_finite(name, average, dtype)


def cast_finite(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor, and raise if a number in it is too large for that.

    Raises:
        ValueError: A finite number would become infinite.
    """
    found = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = tensor.isfinite() & ~found.to(tensor.dtype).isfinite()
        if lost.any():
            raise ValueError(f"{name} has the value {tensor[lost][0]}, too large for {dtype}")
    return found
