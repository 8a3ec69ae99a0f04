"""The average of checkpoint files."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
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
            diffusers or peft wrote, or with a single ``.pt``, ``.pth``, ``.ckpt`` or
            ``.safetensors`` file.
        weights: Weight of each file, 0 or more, normalized by their sum. Default: equal weights.
        key: Path of the state dict in a torch file: ``"model"``, ``"ema.averages.0.tensors"``.
        prefix: Only tensors whose names begin with it, such as ``"model."``; the others may differ
            between the files.
        dtype: Dtype of the averages. Default: that of each tensor in the first file. A real dtype
            is not applied to complex tensors, nor a complex one to real tensors.
        device: Device of the averages.
        progress: Called after each tensor with the fraction of all tensors that has been read.

    Returns:
        The tensors by name, in the order of the first file. Integer and boolean tensors are those
        of the last file. Names that are tied in all files share a tensor. If the files hold the
        versions of modules, so does the dict, which is an ``OrderedDict`` then.

    Raises:
        TypeError: If ``paths`` is a single path.
        FileNotFoundError: If a file, or a shard of one, is missing.
        FileError: If a file is not an intact state dict. It is a ``ValueError``.
        NameMismatchError: If a file does not have the names and shapes of the first one.
        ValueError: If no file is given, a file has other kinds of dtypes, a value is too large for
            the dtype, or the weights are not one per file, 0 or more, and finite and positive in
            sum.
        ImportError: If a file is in the safetensors format, and the package is not installed.

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
    if not files:
        raise ValueError("average_checkpoints: there is no file to average")
    # Everything that can be wrong is found before the first tensor is read.
    shares = _checked_weights(weights, len(files))

    # The metadata outlives the open file.
    opened = partial(Checkpoint, key=key, prefix=prefix)
    first = opened(files[0])
    shapes = first.shapes
    dtypes = first.dtypes
    versions = first.versions
    fitting = partial(_fitting, opened=opened, first=files[0], shapes=shapes, dtypes=dtypes)
    ties_of_others = [_ties(fitting(path)) for path in files[1:]]
    second_names = dict(_ties(first).intersection(*ties_of_others))
    del first

    names = [name for name in shapes if name not in second_names]
    averages: dict[str, Tensor] = {}
    total = 0.0
    for index, (path, share) in enumerate(zip(files, shares, strict=True)):
        total += share
        # A running mean is exact for equal values, where a sum of parts is not.
        fraction = share / total if total else 0.0
        # Compared again: a running training job may have replaced the file since.
        checkpoint = fitting(path)
        for done, name in enumerate(names, 1):
            tensor = checkpoint.tensor(name)
            if not is_averaged(tensor) or fraction == 1.0:
                averages[name] = tensor.to(device, kept_dtype(tensor.dtype, "fp32"), copy=True)
            elif fraction:
                averages[name].lerp_(tensor.to(device, averages[name].dtype), fraction)
            del tensor
            if progress is not None:
                progress((index + done / len(names)) / len(files))
        # Before the next one is opened.
        del checkpoint

    for name in names:
        # One at a time: the averages are not all in memory in two dtypes.
        averages[name] = cast(name, averages[name], dtypes[name], dtype)
    result = OrderedDict((name, averages[second_names.get(name, name)]) for name in shapes)
    if not versions:
        return dict(result)
    # Some modules, torchvision's MNASNet for instance, refuse to load a state without its version.
    vars(result)["_metadata"] = dict(versions)
    return result


def _checked_weights(weights: Sequence[float] | None, files: int) -> Sequence[float]:
    """Return a weight per file; raise ValueError unless a mean can be made of them."""
    if weights is None:
        return [1.0] * files
    if len(weights) != files:
        raise ValueError(f"average_checkpoints: {len(weights)} weights for {files} files")
    is_valid = all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not is_valid or not 0 < sum(weights) < math.inf:
        raise ValueError(
            "average_checkpoints: weights must be finite, also in sum, 0 or more, not all 0: "
            f"{weights!r}"
        )
    return weights


def _fitting(
    path: Path,
    opened: Callable[[Path], Checkpoint],
    first: Path,
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, str],
) -> Checkpoint:
    """Open a file that must be like the first one.

    Args:
        path: The file.
        opened: Opens a file.
        first: The first file, for errors.
        shapes: Shapes in the first file by name.
        dtypes: Dtypes in the first file by name, such as ``"float32"``.

    Returns:
        The opened file.

    Raises:
        NameMismatchError: If it does not have these names and shapes.
        ValueError: If it has other kinds of dtypes.
    """
    checkpoint = opened(path)
    check_match(f"{path} does not fit {first}", shapes, checkpoint.shapes, end="")

    for name, expected in dtypes.items():
        dtype = checkpoint.dtypes[name]
        if _kind(expected) != _kind(dtype):
            raise ValueError(
                shown(f"{path}: {name} is torch.{dtype}, and torch.{expected} in the first file")
            )
    return checkpoint


def _kind(dtype: str) -> str:
    """Return the kind of a dtype. A cast to another kind loses integers or imaginary parts."""
    name = dtype.removeprefix("b")
    return next((kind for kind in ("float", "complex") if name.startswith(kind)), "integer")


def _ties(checkpoint: Checkpoint) -> frozenset[tuple[str, str]]:
    """Return each name whose tensor has an earlier name, with that name."""
    first_name_of: dict[Hashable, str] = {}
    pairs: set[tuple[str, str]] = set()
    for name in checkpoint.shapes:
        memory = checkpoint.memory(name)
        if memory is None:
            continue
        first_name = first_name_of.setdefault(memory, name)
        if first_name != name:
            pairs.add((name, first_name))
    return frozenset(pairs)


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
        # torch does not know which values of 8 bits are finite.
        wide = kept_dtype(average.dtype, "fp32")
        values = average.to(wide)
        lost = values.isfinite() & ~result.to(wide).isfinite()
        if dtype.itemsize == 1:
            # Some have no infinity, and the maximum instead of what is too large.
            largest = torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 2)
            lost |= values.isfinite() & (values.abs() > largest)
        if lost.any():
            value = values[lost][0]
            raise ValueError(shown(f"{name} has the value {value}, too large for {dtype}"))
    return result


publish("modkit", average_checkpoints)
