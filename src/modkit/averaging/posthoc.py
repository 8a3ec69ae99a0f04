"""Post-hoc EMA: choose the width of the average after training (Karras et al. 2024, arXiv 2312.02696).

In training, two power averages are kept, a narrow and a wide one, and saved now and then. Afterwards, an
average of nearly any width, at nearly any step, is a combination of these snapshots.

Example:
    >>> import tempfile
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> averages = PostHocEMA(model, tempfile.mkdtemp(), snapshot_every=100)
    >>> for step in range(1, 1001):
    ...     weight = torch.nn.init.constant_(model.weight, step)
    ...     averages.update()
    >>> wide = averages.reconstruct(sigma_rel=0.15)
    >>> wide.step, round(wide.averages["weight"].item()), round(wide.fit.error, 3)
    (1000, 821, 0.022)
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modkit.averaging._members import Members, check_match
from modkit.averaging._power_averages import (
    PowerAverages,
    averaged_parameters,
    other_members,
    shapes,
)
from modkit.averaging._power_fit import Fit, fit_power
from modkit.averaging._snapshots import (
    Snapshot,
    check_options,
    find_snapshots,
    read_facts,
    read_tensors,
    save_snapshot,
)


__all__ = [
    "Fit",
    "PostHocEMA",
    "Reconstruction",
    "Snapshot",
    "find_snapshots",
    "fit_power",
    "reconstruct",
    "save_snapshot",
]

PathLike: TypeAlias = str | os.PathLike[str]


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

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Write the average and the buffers into a model, whatever its dtype and device.

        Raises:
            NameMismatchError: The model does not have just these parameters and buffers. Nothing has
                been written then.
        """
        members = Members(model)
        found = {**averaged_parameters(members), **other_members(model, members)}
        own = {**self.averages, **self.buffers}
        check_match("the snapshots", shapes(own), shapes(found))
        for name, tensor in found.items():
            tensor.copy_(own[name])


class PostHocEMA:
    """Keeps power averages of a model in training, and saves them now and then.

    Args:
        model: The model in training.
        directory: Where the snapshots go; it is made if it is not there.
        sigma_rels: The relative widths of the averages, below 0.2886. Averages narrower than the first
            of them cannot be reconstructed.
        snapshot_every: After how many steps a snapshot of each is saved, a multiple of ``update_every``;
            ``None`` for calls of :meth:`snapshot` only. Ten or more in a run make for a small error.
        update_every: After how many steps the averages are updated; it does not change their width.
        dtype: A narrower dtype for the files, see :func:`save_snapshot`. The averages themselves are in
            float32, or in the dtype of the parameter if that is wider.
        file_format: ``"pt"`` or ``"safetensors"``.

    Raises:
        ValueError: There are no widths, one of them is impossible, or the numbers of steps are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        directory: PathLike,
        sigma_rels: Sequence[float] = (0.05, 0.1),
        *,
        snapshot_every: int | None = None,
        update_every: int = 1,
        dtype: torch.dtype | None = None,
        file_format: str = "pt",
    ) -> None:
        if not sigma_rels:
            raise ValueError("PostHocEMA: sigma_rels must name one width or more")
        if update_every < 1:
            raise ValueError(f"PostHocEMA: update_every must be 1 or more, got {update_every}")
        if snapshot_every is not None and (snapshot_every < 1 or snapshot_every % update_every):
            raise ValueError(
                f"PostHocEMA: snapshot_every must be a multiple of update_every={update_every}, "
                f"got {snapshot_every}"
            )
        check_options(dtype, file_format)
        self.directory = Path(directory)
        self.snapshot_every = snapshot_every
        self.dtype = dtype
        self.file_format = file_format
        self._averages = PowerAverages(model, sigma_rels, update_every)

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return self._averages.step

    def update(self) -> None:
        """Count a step of training; call it after each step of the optimizer.

        Raises:
            NameMismatchError: The model does not have the parameters that it had at the first update.
        """
        self._averages.update()
        if self.snapshot_every is not None and self.step % self.snapshot_every == 0:
            self.snapshot()

    def snapshot(self) -> list[Snapshot]:
        """Save each average in a file of its own.

        Returns:
            The files; their step is that of the latest update of the averages.

        Raises:
            RuntimeError: There has been no update yet.
        """
        if not self._averages.averages:
            raise RuntimeError("PostHocEMA: there is no average to save before the first update")
        step = self.step - self.step % self._averages.update_every
        model = self._averages.model
        buffers = other_members(model, Members(model))
        return [
            save_snapshot(
                self.directory,
                average.tensors,
                step=step,
                sigma_rel=sigma_rel,
                buffers=buffers,
                dtype=self.dtype,
                file_format=self.file_format,
            )
            for average, sigma_rel in zip(
                self._averages.averages, self._averages.sigma_rels, strict=True
            )
        ]

    def reconstruct(
        self, sigma_rel: float, step: int | None = None, *, max_error: float = 0.1
    ) -> Reconstruction:
        """Put the average of another width together, see :func:`reconstruct`.

        Files of later steps than the present one, which are those of a run that was given up for an
        earlier checkpoint, are not looked at.
        """
        found = [each for each in find_snapshots(self.directory) if each.step <= self.step]
        return reconstruct(found, sigma_rel, step, max_error=max_error)

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the averages: what training needs to go on, besides the files.

        ``torch.load`` reads it with ``weights_only=True``.
        """
        return self._averages.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ValueError: The state is of averages of other widths or of another interval, or, as a
                NameMismatchError, of another model. Nothing has changed then.
        """
        self._averages.load_state_dict(state_dict)


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
