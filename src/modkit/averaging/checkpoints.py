"""The average of checkpoint files."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from modkit._namespace import publish
from modkit._upstream import never_compiled
from modkit.averaging.precision import is_averaged, kept_dtype
from modkit.averaging.tensors import check_match
from modkit.errors import shown
from modkit.files.tensor_files import Checkpoint


__all__ = ["average_checkpoints"]


# In this order: the mark is on the code of a function, and torch's decorators share theirs.
@torch.no_grad()
@never_compiled
def average_checkpoints(
    paths: Iterable[str | os.PathLike[str]],
    weights: Sequence[float] | None = None,
    *,
    key: str | None = None,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[float], object] | None = None,
) -> dict[str, Tensor]:
    """Return the weighted average of checkpoints: a model soup, or the last checkpoints of a run.

    The average of a tensor is ``sum(weight * tensor) / sum(weight)``. Memory holds the running
    mean, in float32 or wider, and one checkpoint. All names and shapes are compared before the
    first tensor is read. Sources: https://arxiv.org/abs/2203.05482 (model soups),
    https://arxiv.org/abs/2209.14981 (LAWA).

    Args:
        paths: Files of ``torch.save`` (loaded with ``weights_only=True``), ``.safetensors`` files,
            the ``.index.json`` of a sharded checkpoint, or directories: those that transformers,
            diffusers, peft or ``torch.distributed.checkpoint`` wrote, or with a single ``.pt``,
            ``.pth``, ``.ckpt`` or ``.safetensors`` file.
        weights: Weight of each file, normalized by their sum. Negative ones are allowed, as in the
            difference of two cumulative averages. Default: equal weights.
        key: Path of the state dict in a torch file: ``"model"``, ``"ema.averages.0.tensors"``.
        prefix: Only tensors whose names begin with it, such as ``"model."``; the others may differ
            between the files.
        dtype: Dtype of the averages. Default: that of each tensor in the first file. A real dtype
            is not applied to complex tensors, nor a complex one to real tensors.
        device: Device of the averages.
        progress: Called after each tensor with the fraction of all tensors that has been read.

    Returns:
        The tensors by name, in the order of the first file. Integer and boolean tensors are those
        of the last file. Tied tensors are equal, and no longer share memory: loading them into the
        model ties them again. If the files hold the versions of modules, so does the dict, which is
        an ``OrderedDict`` then.

    Raises:
        TypeError: If ``paths`` is a single path.
        FileNotFoundError: If a file, or a shard of one, is missing.
        FileError: If a file is not an intact state dict. It is a ``ValueError``.
        NameMismatchError: If a file does not have the names and shapes of the first one.
        ValueError: If no file is given, a file has other kinds of dtypes, a value is too large for
            the dtype, or the weights are not one per file and finite, with a sum other than 0.

    Example:
        >>> import torch
        >>> paths = [tmp_path / f"{name}.pt" for name in "ab"]
        >>> for path, value in zip(paths, (1.0, 2.0)):
        ...     torch.save({"weight": torch.tensor([value])}, path)
        >>> average_checkpoints(paths, weights=[3, 1])
        {'weight': tensor([1.2500])}
    """
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"average_checkpoints: paths must be a list of files, got {paths!r}")
    files = [Path(path) for path in paths]
    # Everything that can be wrong is found before the first tensor is read.
    shares = _checked_weights(weights, len(files))
    first = Checkpoint(files[0], key=key, prefix=prefix)
    shapes, dtypes, versions = first.shapes, first.dtypes, first.versions

    def fitting(path: Path) -> Checkpoint:
        checkpoint = Checkpoint(path, key=key, prefix=prefix)
        check_match(f"{path} does not fit {files[0]}", shapes, checkpoint.shapes, end="")
        return checkpoint

    for path in files[1:]:
        fitting(path)
    del first

    averages: dict[str, Tensor] = {}
    total = 0.0
    # With negative weights last, no part of the sum is 0.
    order = sorted(range(len(files)), key=lambda index: shares[index] < 0)
    for count, index in enumerate(order):
        total += shares[index]
        # Compared again: a running training job may have replaced the file since.
        checkpoint = fitting(files[index])
        for done, name in enumerate(shapes, 1):
            # A running mean is exact for equal values, where a sum of parts is not.
            fraction = shares[index] / total if total else 0.0
            tensor = checkpoint.tensor(name).to(device)
            _check_kind(files[index], name, tensor.dtype, getattr(torch, dtypes[name]))
            _add(averages, name, tensor, fraction, is_last=index == len(files) - 1)
            if progress is not None:
                progress((count + done / len(shapes)) / len(files))
        # Before the next one is opened.
        del checkpoint

    for name in shapes:
        # One at a time: the averages are not all in memory in two dtypes.
        averages[name] = cast(name, averages[name], dtypes[name], dtype)
    if not versions:
        return averages
    result = OrderedDict(averages)
    # Some modules, torchvision's MNASNet for instance, refuse to load a state without its version.
    vars(result)["_metadata"] = dict(versions)
    return result


def _add(
    averages: dict[str, Tensor], name: str, tensor: Tensor, fraction: float, *, is_last: bool
) -> None:
    """Move an average to a tensor by a fraction; integers are those of the last file."""
    is_replaced = fraction == 1.0 if is_averaged(tensor) else is_last
    if is_replaced:
        averages[name] = tensor.to(kept_dtype(tensor.dtype, "fp32"), copy=True)
    elif is_averaged(tensor) and fraction:
        average = averages[name]
        value = tensor.to(average.dtype)
        # The infinities of a mask are equal in all files; their difference would be NaN.
        is_equal = average == value
        torch.where(is_equal, value, average.lerp_(value, fraction), out=average)


def _checked_weights(weights: Sequence[float] | None, files: int) -> Sequence[float]:
    """Return a weight per file; raise ValueError unless a mean can be made of them."""
    if not files:
        raise ValueError("average_checkpoints: there is no file to average")
    if weights is None:
        return [1.0] * files
    if len(weights) != files:
        raise ValueError(f"average_checkpoints: {len(weights)} weights for {files} files")
    total = sum(weights)
    if not total or not math.isfinite(sum(map(abs, weights))):
        raise ValueError(
            f"average_checkpoints: weights must be finite, with a sum other than 0: {weights!r}"
        )
    # The average is the same with the opposite of all weights.
    return [math.copysign(1.0, total) * weight for weight in weights]


def _check_kind(path: Path, name: str, dtype: torch.dtype, first: torch.dtype) -> None:
    """Raise ValueError where a cast to the first file's dtype loses integers or complex parts."""
    if (dtype.is_floating_point, dtype.is_complex) != (first.is_floating_point, first.is_complex):
        raise ValueError(shown(f"{path}: {name} is {dtype}, and {first} in the first file"))


def cast(name: str, average: Tensor, first: str, dtype: torch.dtype | None) -> Tensor:
    """Cast an average; integers stay as they are.

    Args:
        name: Its name, for the error.
        average: The average.
        first: Its dtype in the first file, such as ``"float32"``.
        dtype: The requested dtype. If it is None, or complex where the average is real or the other
            way round, ``first`` is used.

    Returns:
        The average in that dtype.

    Raises:
        ValueError: If a finite value is too large for the dtype.
    """
    if not is_averaged(average):
        return average
    if dtype is None or dtype.is_complex != average.is_complex():
        dtype = getattr(torch, first)
        assert isinstance(dtype, torch.dtype)

    # A narrower dtype may turn a finite value into infinity, which a model would only show later.
    result = average.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(average.dtype).max:
        # torch does not know which values of 8 bits are finite. Some of these dtypes have no
        # infinity, and the maximum instead of what is too large.
        wide = kept_dtype(average.dtype, "fp32")
        values = average.to(wide)
        largest = torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 2)
        lost = values.isfinite() & ((values.abs() > largest) | ~result.to(wide).isfinite())
        if lost.any():
            value = values[lost][0]
            raise ValueError(shown(f"{name} has the value {value}, too large for {dtype}"))
    return result


publish("modkit", average_checkpoints)
