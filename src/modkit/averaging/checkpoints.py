"""Averages of checkpoints that are on disk already."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from modkit.averaging._checkpoint_files import Checkpoint
from modkit.averaging._members import check_match
from modkit.averaging._precision import is_averaged, kept_dtype


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
        The averages by name, in the order of the first file. ``load_state_dict`` takes them.

    Raises:
        TypeError: One path is given in place of a list.
        FileNotFoundError: A file is missing.
        NameMismatchError: A file does not have the names and shapes of the first one.
        ValueError: A file cannot be read or holds something other than tensors, there is none, a
            tensor does not fit the checksum that a file of torch has of it, a tensor is of integers in one file and of floats in another, or the weights are not one for
            each file, finite, and positive in sum.

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
    expected = Checkpoint(files[0], key).shapes
    for path in files[1:]:
        found = Checkpoint(path, key).shapes
        check_match(f"{path} does not fit {files[0]}", expected, found)
    averages: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    total = 0.0
    for index, (path, share) in enumerate(zip(files, shares, strict=True)):
        total += share
        # A mean that moves is exact for equal values, where a sum of parts is not.
        part = share / total if total else 0.0
        checkpoint = Checkpoint(path, key)
        for done, name in enumerate(expected, 1):
            _take_in(checkpoint, name, averages, dtypes, part, device)
            if progress is not None:
                progress((index + done / len(expected)) / len(files))
    return {name: _finished(averages[name], dtypes[name], dtype) for name in expected}


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
    checkpoint: Checkpoint,
    name: str,
    averages: dict[str, Tensor],
    dtypes: dict[str, torch.dtype],
    part: float,
    device: str | torch.device,
) -> None:
    tensor = checkpoint.tensor(name)
    first = dtypes.setdefault(name, tensor.dtype)
    if is_averaged(tensor) != (first.is_floating_point or first.is_complex):
        raise ValueError(
            f"{checkpoint.path}: {name} is {tensor.dtype}, and {first} in the first file"
        )
    if not is_averaged(tensor) or part == 1.0:
        wide = kept_dtype(tensor.dtype, "fp32")
        averages[name] = tensor.to(device, wide, copy=True)
    elif part:
        averages[name].lerp_(tensor.to(device, averages[name].dtype), part)


def _finished(average: Tensor, first: torch.dtype, dtype: torch.dtype | None) -> Tensor:
    if not is_averaged(average):
        return average
    chosen = dtype is not None and dtype.is_complex == average.is_complex()
    return average.to(dtype if chosen else first)
