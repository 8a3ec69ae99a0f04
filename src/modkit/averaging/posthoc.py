"""Post-hoc EMA: choose the width of the average after training (Karras et al. 2024, arXiv 2312.02696).

In training, two power averages are kept, a narrow and a wide one, and saved now and then. Afterwards, an
average of nearly any width, at nearly any step, is a combination of these snapshots.

Example:
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> for step, value in ((1000, 1.0), (2000, 3.0)):
    ...     for sigma_rel in (0.05, 0.1):
    ...         weights = {"weight": torch.full((2,), value)}
    ...         snapshot = save_snapshot(folder, weights, step=step, sigma_rel=sigma_rel)
    >>> reconstruct(folder, sigma_rel=0.1, step=1000).averages
    {'weight': tensor([1., 1.])}
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modkit.averaging._power_fit import Fit, fit_power
from modkit.averaging._snapshots import (
    Snapshot,
    find_snapshots,
    read_facts,
    read_tensors,
    save_snapshot,
)


__all__ = [
    "Fit",
    "Reconstruction",
    "Snapshot",
    "find_snapshots",
    "fit_power",
    "reconstruct",
    "save_snapshot",
]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Reconstruction:
    """An average that was put together from snapshots.

    Args:
        averages: The averaged tensors by name, in float32, or in the dtype of the snapshots if that
            is wider.
        buffers: The tensors that are not averaged, from the latest of the snapshots.
        sigma_rel: Relative width of the average.
        step: The step at which it is the average.
        fit: How near the average is to the one that was asked for.
        snapshots: The files that it was made from, in the order of ``fit.coefficients``.
    """

    averages: dict[str, Tensor]
    buffers: dict[str, Tensor]
    sigma_rel: float
    step: int
    fit: Fit
    snapshots: tuple[Snapshot, ...]


def reconstruct(
    snapshots: PathLike | Iterable[Snapshot | PathLike],
    sigma_rel: float,
    step: int | None = None,
    *,
    max_error: float = 0.1,
) -> Reconstruction:
    """Put the average of any width together from snapshots of others.

    The files are read one after the other: besides the result, one of them is in memory.

    Args:
        snapshots: A directory, or the files.
        sigma_rel: Relative width of the wanted average: not narrower than the narrowest of the
            snapshots, and below 0.2886. It may be wider than the widest.
        step: The step at which it is wanted, by default that of the latest snapshot. Later snapshots
            are left out.
        max_error: The largest relative error of the fit that is accepted, see :class:`Fit`. It is
            small at the steps of snapshots, and large between them, where no snapshot has seen
            the latest models.

    Returns:
        The average, and the error of the fit.

    Raises:
        ValueError: The average would have to be extrapolated: it is narrower than all snapshots, its
            step is later than all or earlier than all of them, or the error is too large.
        ValueError: The snapshots do not hold the same tensors.
        FileNotFoundError: The directory holds no snapshots.
    """
    found = collect(snapshots)
    step = found[-1].step if step is None else step
    refuse_extrapolation(found, sigma_rel, step)
    usable = [snapshot for snapshot in found if snapshot.step <= step]
    fit = fit_power([(each.sigma_rel, each.step) for each in usable], sigma_rel, step)
    if not fit.error <= max_error:
        raise ValueError(
            f"the average with sigma_rel={sigma_rel} at step {step} can be met with a relative error of "
            f"{fit.error:.2g} only, more than max_error={max_error}. The nearest earlier snapshot is of "
            f"step {usable[-1].step}; more frequent snapshots make the error smaller"
        )
    averages, buffers = combine(usable, fit.coefficients)
    return Reconstruction(averages, buffers, sigma_rel, step, fit, tuple(usable))


def collect(snapshots: PathLike | Iterable[Snapshot | PathLike]) -> list[Snapshot]:
    """Return the snapshots by step and width, whichever way they were named."""
    if isinstance(snapshots, (str, os.PathLike)):
        found = find_snapshots(snapshots)
    else:
        given = [
            each if isinstance(each, Snapshot) else read_facts(Path(each)) for each in snapshots
        ]
        found = sorted(given)
    if not found:
        raise FileNotFoundError(f"no snapshots of averages in {snapshots!r}")
    return found


def refuse_extrapolation(snapshots: list[Snapshot], sigma_rel: float, step: int) -> None:
    """Raise where no combination of the snapshots can be near the wanted average."""
    narrowest = min(snapshot.sigma_rel for snapshot in snapshots)
    if sigma_rel < narrowest and not math.isclose(sigma_rel, narrowest):
        raise ValueError(
            f"sigma_rel={sigma_rel} is narrower than all snapshots: {narrowest} or more"
        )
    first, last = snapshots[0].step, snapshots[-1].step
    if not first <= step <= last:
        raise ValueError(
            f"step {step} is outside of the snapshots, which are from {first} to {last}"
        )


def combine(
    snapshots: list[Snapshot], coefficients: Iterable[float]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add up the averaged tensors of the files, and take the others from the last one."""
    sums: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    needed = [pair for pair in zip(snapshots, coefficients, strict=True) if pair[1] != 0]
    for snapshot, coefficient in needed:
        seen: set[str] = set()
        for name, tensor, averaged in read_tensors(snapshot.path):
            if not averaged:
                buffers[name] = tensor.clone()
                continue
            seen.add(name)
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            if snapshot is needed[0][0]:
                sums[name] = wide * coefficient
            elif name in sums and sums[name].shape == wide.shape:
                sums[name].add_(wide, alpha=coefficient)
            else:
                raise ValueError(
                    f"{snapshot.path} has another tensor {name!r} than the snapshots before it"
                )
        if missing := sums.keys() - seen:
            raise ValueError(f"{snapshot.path} has no tensor {min(missing)!r}")
    return sums, buffers
