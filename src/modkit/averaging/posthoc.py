"""Post-hoc EMA: choose the width after training.

The method is that of Karras et al. 2024, https://arxiv.org/abs/2312.02696. Everything in
``__all__`` is public as :mod:`modkit.posthoc`, and ``PostHocEMA`` as ``modkit.PostHocEMA``.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor
from typing_extensions import override

from modkit._namespace import publish
from modkit._upstream import never_compiled
from modkit.averaging.ema import EMA, ModelT_co
from modkit.averaging.options import Device, Names, checked_count
from modkit.averaging.precision import Precision, compact, is_averaged
from modkit.averaging.schedules import Power, gamma_of
from modkit.averaging.sharding import whole_tensor
from modkit.averaging.state import OWN, Part
from modkit.averaging.tensors import NamedTensors, check_match, shapes_of, write
from modkit.errors import FileError
from modkit.files.checkpoints import save_checkpoint
from modkit.files.tensor_files import StateDictFile, content_of_file


__all__ = [
    "Fit",
    "Reconstruction",
    "Snapshot",
    "find_snapshots",
    "fit_power",
    "reconstruct",
    "save_snapshot",
]

PathLike: TypeAlias = str | os.PathLike[str]

# A double has each step up to this one.
_LAST_STEP: Final = 2**53

_MSG_STRICT: Final = (
    "Snapshots of a part of a model, as of its adapters, go into it with copy_to(strict=False)."
)


@dataclass(frozen=True, order=True)
class Snapshot:
    """A file with one power average. Snapshots are ordered by step, then width.

    The file is a dict that ``torch.load(weights_only=True)`` reads: ``step``, ``sigma_rel``,
    ``run``, ``averages`` and ``buffers``, the last two with tensors by name.

    Attributes:
        step: Number of training steps that the average spans, the initial copy included.
        sigma_rel: Relative width of the average, as in :class:`modkit.schedules.Power`.
        path: The file.
        run: Id of the run that the average is of. Empty for averages that something else than
            ``PostHocEMA`` has computed.
    """

    step: int
    sigma_rel: float
    path: Path
    run: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # A file of something else would make its folder one that cannot be read.
        gamma_of(self.sigma_rel)
        if not isinstance(cast("object", self.step), int) or not 0 < self.step <= _LAST_STEP:
            raise ValueError(f"step must be an int from 1 to {_LAST_STEP}, got {self.step}")
        if not isinstance(cast("object", self.run), str) or len(self.run) > 64:
            raise TypeError(f"run must be an id of at most 64 letters, got {self.run!r:.80}")


def save_snapshot(
    directory: PathLike,
    averages: Mapping[str, Tensor],
    *,
    step: int,
    sigma_rel: float,
    buffers: Mapping[str, Tensor] | None = None,
    run: str = "",
) -> Snapshot:
    """Write a power average to a file in a directory, atomically.

    ``PostHocEMA`` calls it. Use it for averages that something else has computed. A file of the
    same step, width and run is replaced. Sharded tensors are gathered, so all ranks must call this.

    Args:
        directory: Folder of the snapshots, created if missing.
        averages: Floating-point or complex tensors by name. They are written in their dtypes.
        step: Number of training steps that the average spans, the initial copy included.
        sigma_rel: Relative width of the average.
        buffers: Tensors that are not averaged, by name. Default: none.
        run: Id of the run that the average is of. Default: none.

    Returns:
        The snapshot, with the path of the file.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the step is below 1, or the width is out of range.

    Example:
        >>> import torch
        >>> from modkit.posthoc import save_snapshot
        >>> weights = {"weight": torch.ones(2)}
        >>> save_snapshot(tmp_path, weights, step=100, sigma_rel=0.05).path.name
        'ema-0000000100-0.05.pt'
    """
    # The id is part of the name, so that runs in one folder do not replace each other's files.
    name = f"ema-{step:010d}-{sigma_rel:.6g}"
    path = Path(directory) / (f"{name}-{run}.pt" if run else f"{name}.pt")
    # Plain numbers, whatever was given: the file is read with ``weights_only=True``.
    snapshot = Snapshot(int(step), float(sigma_rel), path, run)
    path.parent.mkdir(parents=True, exist_ok=True)

    content = {
        "step": snapshot.step,
        "sigma_rel": snapshot.sigma_rel,
        "run": run,
        "averages": _gathered(averages),
        "buffers": _gathered(buffers or {}),
    }
    save_checkpoint(content, path)
    return snapshot


def _fingerprint(averages: Mapping[str, Tensor], step: int) -> str:
    """Return an id of a run by its first snapshot, the same on all ranks without communication."""
    digest = hashlib.blake2b(str(step).encode(), digest_size=4)
    for name, tensor in averages.items():
        sample = tensor.detach().flatten()[:64].to(torch.complex128)
        digest.update(repr((name, sample.tolist())).encode())
    return digest.hexdigest()


def _gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors in host memory, each in a storage of its own."""
    return {name: compact(whole_tensor(t).detach().cpu()) for name, t in tensors.items()}


def find_snapshots(directory: PathLike) -> list[Snapshot]:
    """Return the snapshots in a directory, without reading their tensors.

    Args:
        directory: Folder of the snapshots. Its subfolders are not searched.

    Returns:
        The snapshots, ordered by step and width; an empty list if there are none.

    Raises:
        FileError: If a file named like a snapshot is not one, or is corrupt. The error names it.

    Example:
        >>> import torch
        >>> from modkit.posthoc import find_snapshots, save_snapshot
        >>> folder = tmp_path / "snapshots"
        >>> for step in (200, 100):
        ...     _ = save_snapshot(folder, {"weight": torch.ones(1)}, step=step, sigma_rel=0.05)
        >>> [snapshot.step for snapshot in find_snapshots(folder)]
        [100, 200]
    """
    return sorted(map(_read_header, Path(directory).glob("ema-*.pt")))


def _read_header(path: Path) -> Snapshot:
    """Return what a file says of its average; it comes from outside, and may hold anything."""
    content = content_of_file(path)
    header = content if isinstance(content, Mapping) else {}
    keys = ["step", "sigma_rel", "run", "averages", "buffers"]
    missing = [key for key in keys if key not in header]
    if missing:
        raise FileError(f"{path} is not a snapshot of an average: it has no {missing[0]!r}")

    try:
        return Snapshot(header["step"], header["sigma_rel"], path, header["run"])
    except (TypeError, ValueError, OverflowError) as error:
        raise FileError(f"{path} is corrupt: {error}") from error


@dataclass(frozen=True)
class Fit:
    """How well a combination of power averages approximates the requested one.

    Attributes:
        coefficients: The factor of each average. Their sum is 1; some may be negative.
        error: Root mean square over time of the difference of the two profiles, relative to that of
            the requested profile. 0 is exact, 0.01 is very good.
    """

    coefficients: tuple[float, ...]
    error: float


def fit_power(averages: Sequence[tuple[float, int]], sigma_rel: float, step: int) -> Fit:
    """Find the combination of power averages that is nearest to another power average.

    The power average at step ``T`` with exponent ``g`` weighs the model of time ``t`` by ``(g + 1)
    / T * (t / T) ** g``. The combination has the least squared distance to that profile, as in
    section 3.2 and Algorithm 3 of https://arxiv.org/abs/2312.02696. Use it before training, to see
    which snapshots a width needs. It is exact for averages that are updated in every step. Averages
    that hardly differ share a coefficient, so that no rounding of theirs is amplified.

    Args:
        averages: ``sigma_rel`` and step of each average that is there. Those of later steps than
            ``step`` get the coefficient 0.
        sigma_rel: Requested relative width, above 0 and below 0.2886.
        step: Step of the requested average, 1 or more.

    Returns:
        The coefficients, in the order of ``averages``, and the errors.

    Raises:
        ValueError: If a step is below 1, a width is out of range, no average is from ``step`` or
            before it, two averages are equal, or all are of steps so much earlier that they share
            nothing with the requested one.

    Example:
        >>> from modkit.posthoc import fit_power
        >>> fit_power([(0.05, 500), (0.05, 1000), (0.1, 500), (0.1, 1000)], 0.1, 1000).coefficients
        (0.0, 0.0, 0.0, 1.0)
        >>> round(fit_power([(0.05, 1000), (0.1, 1000)], 0.08, 1000).error, 2)
        0.05
    """
    if min([step, *(end for _, end in averages)]) < 1:
        raise ValueError("steps must be 1 or more: at step 1, an average is the first model")
    used = [pair for pair in averages if pair[1] <= step]
    if not used:
        raise ValueError(f"none of the {len(averages)} averages is from step {step} or before it")
    if len(set(used)) < len(used):
        raise ValueError("two averages have the same sigma_rel and the same step")
    if (sigma_rel, step) in used:
        return Fit(tuple(float(pair == (sigma_rel, step)) for pair in averages), 0.0)

    # Time is measured in units of the requested step, which keeps the numbers near 1.
    profiles = [(gamma_of(width), end / step) for width, end in used]
    gammas, ends = torch.tensor(profiles, dtype=torch.float64, device="cpu").T
    gamma, end = torch.tensor([gamma_of(sigma_rel), 1.0], dtype=torch.float64, device="cpu")
    between = _inner_products(gammas[:, None], ends[:, None], gammas, ends)
    with_requested = _inner_products(gammas, ends, gamma, end)

    # The least squares' normal equations, of profiles of norm 1: an early one is short and high.
    # Averages that are nearly equal make them nearly singular. What would tell such averages apart
    # is left out, because it is rounding, which huge coefficients of opposite signs would amplify:
    # differences of a part of 1e-12 of the squared norm.
    scale = between.diagonal().rsqrt()
    left, right = scale[:, None] * between * scale, (scale * with_requested)[:, None]
    solution = torch.linalg.lstsq(left, right, rcond=1e-12, driver="gelsd").solution[:, 0] * scale
    # Of weights that sum to 1, an average of equal models is that model.
    solution = solution / solution.sum()
    if not solution.isfinite().all():
        raise ValueError(f"no average resembles one of step {step}: all are of much earlier steps")

    # The squared distance |A x - b|^2, multiplied out, has the products that are there already.
    requested_norm = _inner_products(gamma, end, gamma, end)
    squared = solution @ between @ solution - 2 * (solution @ with_requested) + requested_norm
    distance = math.sqrt(max(0.0, float(squared)))

    shares = dict(zip(used, solution.tolist(), strict=True))
    coefficients = tuple(shares.get(pair, 0.0) for pair in averages)
    return Fit(coefficients, distance / math.sqrt(float(requested_norm)))


def _inner_products(
    gammas: Tensor, ends: Tensor, other_gammas: Tensor, other_ends: Tensor
) -> Tensor:
    """Return the integrals of products of two profiles, for exponents and ends that broadcast.

    This is equation 151 of the paper. It integrates ``(g + 1) / T * (t / T) ** g`` times
    ``(h + 1) / U * (t / U) ** h`` up to the smaller end ``m = min(T, U)``:
    ``(g + 1) * (h + 1) / (g + h + 1) * (m / T) ** (g + 1) * (m / U) ** (h + 1) / m``.
    """
    common = torch.minimum(ends, other_ends)
    powers = (common / ends) ** (gammas + 1) * (common / other_ends) ** (other_gammas + 1)
    return (gammas + 1) * (other_gammas + 1) / (gammas + other_gammas + 1) * powers / common


@dataclass(frozen=True)
class Reconstruction:
    """A power average that was combined from snapshots.

    Attributes:
        averages: Averaged tensors by name, on the CPU, in float32 or wider.
        buffers: Tensors that are not averaged, from the latest of the snapshots used.
        sigma_rel: Relative width of the average.
        step: Step of the average.
        fit: The coefficients and the error of the combination.
        snapshots: The snapshots, in the order of ``fit.coefficients``.
    """

    averages: dict[str, Tensor]
    buffers: dict[str, Tensor]
    sigma_rel: float
    step: int
    fit: Fit
    snapshots: tuple[Snapshot, ...]

    def __repr__(self) -> str:
        return (
            f"Reconstruction(sigma_rel={self.sigma_rel}, step={self.step}, "
            f"{len(self.averages)} averages, fit.error={self.fit.error:.2g})"
        )

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module, *, strict: bool = True) -> None:
        """Write the average and the buffers into a model.

        Args:
            model: Model with the same parameters and persistent buffers, of any dtype and device.
            strict: If False, the model may have others, which keep their values: those that
                ``include``, ``exclude`` or ``trainable_only`` left out of the snapshots.

        Raises:
            NameMismatchError: If names or shapes differ. The model is unchanged.
        """
        values = {**self.averages, **self.buffers}
        tensors = {
            name: member.current()
            for name, member in NamedTensors(model).all().items()
            if member.persistent and (strict or name in values)
        }
        check_match("the snapshots", shapes_of(values), shapes_of(tensors), end=_MSG_STRICT)
        for name, tensor in tensors.items():
            write(tensor, values[name])


def reconstruct(
    snapshots: PathLike | Iterable[Snapshot | PathLike],
    sigma_rel: float,
    step: int | None = None,
    *,
    max_error: float = 0.1,
) -> Reconstruction:
    """Combine snapshots into the power average of another width, or at another step.

    It needs neither the model nor the ``PostHocEMA`` of the training. Memory holds the sum and one
    tensor of a file.

    Args:
        snapshots: A directory, or files or snapshots, of one run.
        sigma_rel: Requested width, below 0.2886, and not below the narrowest of the snapshots.
        step: Step of the requested average, within those of the snapshots. Default: the last.
        max_error: Largest accepted ``Fit.error``. The error is large between the snapshots' steps.

    Returns:
        The average, with the error of its fit.

    Raises:
        FileNotFoundError: If there are no snapshots.
        FileError: If a file is not a snapshot, or is corrupt.
        NameMismatchError: If a file has other tensors than the one before it. It is a
            ``ValueError``.
        ValueError: If the snapshots are of several runs, the width is narrower than all of them or
            too wide, the step is outside of theirs, or the error is above ``max_error``.

    Example:
        >>> import torch
        >>> from modkit.posthoc import reconstruct, save_snapshot
        >>> folder = tmp_path / "run"
        >>> for step in (500, 1000):
        ...     for width in (0.05, 0.1):
        ...         average = {"weight": torch.tensor([1.0])}
        ...         _ = save_snapshot(folder, average, step=step, sigma_rel=width)
        >>> reconstruct(folder, 0.08).averages["weight"]
        tensor([1.])
    """
    if isinstance(snapshots, (str, os.PathLike)):
        available = find_snapshots(snapshots)
    else:
        available = sorted(
            entry if isinstance(entry, Snapshot) else _read_header(Path(entry))
            for entry in snapshots
        )
    if not available:
        raise FileNotFoundError(f"no snapshots of averages in {snapshots}")
    runs = sorted({snapshot.run for snapshot in available})
    if len(runs) > 1:
        raise ValueError(
            f"the snapshots are of {len(runs)} runs, which the names of the files end with: "
            f"{', '.join(map(repr, runs))}. Pass the files of one run"
        )

    # They are ordered by step.
    first = available[0].step
    last = available[-1].step
    step = last if step is None else step
    narrowest = min(snapshot.sigma_rel for snapshot in available)
    if sigma_rel < narrowest and not math.isclose(sigma_rel, narrowest):
        raise ValueError(
            f"the width {sigma_rel} is narrower than all snapshots: {narrowest} or more"
        )
    if not first <= step <= last:
        raise ValueError(
            f"step {step} is outside of the snapshots, which are from {first} to {last}"
        )

    # Later snapshots contain models that the requested average does not.
    usable = [snapshot for snapshot in available if snapshot.step <= step]
    fit = fit_power([(snapshot.sigma_rel, snapshot.step) for snapshot in usable], sigma_rel, step)
    if not fit.error <= max_error:
        raise ValueError(
            f"the average of the width {sigma_rel} at step {step} can be met with a relative "
            f"error of {fit.error:.2g} only, more than max_error={max_error}. The nearest earlier "
            f"snapshot is of step {usable[-1].step}; more frequent snapshots make the error smaller"
        )

    # One file at a time, added to the sum.
    result = Reconstruction(
        averages={}, buffers={}, sigma_rel=sigma_rel, step=step, fit=fit, snapshots=tuple(usable)
    )
    for snapshot, coefficient in zip(usable, fit.coefficients, strict=True):
        if coefficient:
            _add(result, snapshot, coefficient)
    return result


def _add(result: Reconstruction, snapshot: Snapshot, coefficient: float) -> None:
    """Add the averaged tensors of a file, times its coefficient, and replace the buffers."""
    path = snapshot.path
    averages = StateDictFile(path, "averages")
    sums = result.averages
    if sums:
        problem = f"{path} does not fit the snapshots before it"
        check_match(problem, shapes_of(sums), averages.shapes, end="")

    for name in averages.shapes:
        tensor = averages.tensor(name)
        is_other_kind = tensor.is_complex() != sums.get(name, tensor).is_complex()
        if is_other_kind or not is_averaged(tensor) or tensor.itemsize < 2:
            raise FileError(f"{path} is corrupt: its average {name!r} is of {tensor.dtype}")
        # Coefficients of both signs cancel, which 16 bits do not survive.
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if name in sums:
            sums[name].add_(wide, alpha=coefficient)
        else:
            sums[name] = wide * coefficient

    buffers = StateDictFile(path, "buffers")
    for name in buffers.shapes:
        result.buffers[name] = buffers.tensor(name).clone()


class PostHocEMA(EMA[ModelT_co]):
    """Power averages of a model in training, with snapshots from which other widths are made later.

    Training keeps a narrow and a wide power average, and saves a snapshot of each at intervals.
    Then the average of nearly any width, at nearly any step, is a linear combination of snapshots
    (Karras et al. 2024, section 3, https://arxiv.org/abs/2312.02696). It is an :class:`~modkit.EMA`
    whose schedules are :class:`~modkit.schedules.Power`: call :meth:`update` after each step of the
    optimizer, or :meth:`attach` it. The width does not depend on how often it is called. To combine
    snapshots without a model in training, use :func:`modkit.posthoc.reconstruct`. A folder is for
    one run, which continues in it when it is resumed.

    Args:
        model: Model in training. It is neither copied nor modified.
        directory: Folder of the snapshots, created if missing.
        sigma_rels: Relative widths, above 0 and below 0.2886; no narrower average can be
            reconstructed.
        snapshot_every: Number of updates between snapshots; ten or more in a run make the error
            small. None saves in calls of :meth:`snapshot` only.
        precision: Dtype of the averages, as in :class:`~modkit.EMA`.
        device: Device of the averages. Default: that of each parameter.
        include: Globs of names, or a predicate: parameters to average. The others are not in the
            snapshots. Default: all.
        exclude: Globs of names, or a predicate: parameters to leave out.
        trainable_only: Leave out parameters that do not require gradients at the first update, as
            for LoRA.

    Raises:
        TypeError: If ``snapshot_every`` is not an int, a width is not a number, or an option of
            :class:`~modkit.EMA` is invalid.
        ValueError: If there is no width, a width is out of range, ``snapshot_every`` is below 1, or
            an option of :class:`~modkit.EMA` is invalid.

    Attributes:
        directory: Folder of the snapshots.
        snapshot_every: The option; a new value counts from the next update on.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> averages = PostHocEMA(model, tmp_path, snapshot_every=100)
        >>> for step in range(1, 1001):
        ...     weight = torch.nn.init.constant_(model.weight, step)
        ...     averages.update()
        >>> wide = averages.reconstruct(sigma_rel=0.15)
        >>> wide.step, round(wide.averages["weight"].item()), round(wide.fit.error, 3)
        (1000, 821, 0.022)
    """

    directory: Path
    snapshot_every: int | None

    def __init__(
        self,
        model: ModelT_co,
        directory: PathLike,
        sigma_rels: Sequence[float] = (0.05, 0.1),
        *,
        snapshot_every: int | None = None,
        precision: Precision = "fp32",
        device: Device = None,
        include: Names = None,
        exclude: Names = None,
        trainable_only: bool = False,
    ) -> None:
        super().__init__(
            model,
            schedule=[Power(float(sigma_rel)) for sigma_rel in sigma_rels],
            precision=precision,
            device=device,
            include=include,
            exclude=exclude,
            trainable_only=trainable_only,
        )
        if snapshot_every is not None:
            checked_count("snapshot_every", snapshot_every, 1, "PostHocEMA")
        self.directory = Path(directory)
        self.snapshot_every = snapshot_every
        # The id of the run, from the first snapshot on.
        self._run = ""
        self._found = self._files()

    def _files(self) -> set[Path]:
        """Return the snapshots that are compared with this run at its next update.

        What is written after that is of this run: ranks write the same files.
        """
        return {*self.directory.glob("ema-*.pt")}

    @never_compiled
    @override
    def update(self, model: torch.nn.Module | None = None) -> None:
        """Update the averages as ``EMA.update()`` does, and save snapshots if they are due.

        Args:
            model: A model with the same names and shapes. Default: the tracked model.

        Raises:
            FileExistsError: In the first update, if the folder has snapshots of another run.
            NameMismatchError: If names or shapes of the model have changed. The step is not
                counted.
            RuntimeError: If an average is swapped into the model, or a parameter has no values yet.
            OSError: If a snapshot cannot be written. The step is counted.
        """
        self._check_folder()
        super().update(model)
        if self.snapshot_every is not None and self.step % self.snapshot_every == 0:
            self.snapshot()

    def _check_folder(self) -> None:
        """Move snapshots that a resume has given up to a folder beside; refuse those of others."""
        for path in self._found:
            # Other ranks move the same files.
            with suppress(FileNotFoundError):
                snapshot = _read_header(path)
                # A run that is resumed from before its first snapshot does not know its id.
                is_later = snapshot.step > self.step > 0
                if is_later and self._run in ("", snapshot.run):
                    target = self.directory / "abandoned" / path.name
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)
                elif not self._run or self._run != snapshot.run:
                    raise FileExistsError(
                        f"PostHocEMA: {self.directory} has snapshots of another run, such as "
                        f"{path.name}. Pass another directory, or load the state of that run first"
                    )
        self._found = set()

    def snapshot(self) -> list[Snapshot]:
        """Save each average to a file of its own, with the buffers of the latest update.

        Returns:
            The snapshots, in the order of ``sigma_rels``.

        Raises:
            RuntimeError: Before the first update.
            FileExistsError: If the folder has snapshots of another run.
            OSError: If a file cannot be written.
        """
        if not self.n_averaged:
            raise RuntimeError("PostHocEMA: there is no average to save before the first update")
        self._check_folder()

        averages = [average.tensors for average in self._engine.averages]
        self._run = self._run or _fingerprint(_gathered(averages[0]), self.step)
        widths = [cast("Power", schedule).sigma_rel for schedule in self.schedules]
        return [
            save_snapshot(
                self.directory,
                average,
                step=self.step,
                sigma_rel=width,
                buffers=self._engine.copied(),
                run=self._run,
            )
            for average, width in zip(averages, widths, strict=True)
        ]

    def reconstruct(
        self, sigma_rel: float, step: int | None = None, *, max_error: float = 0.1
    ) -> Reconstruction:
        """Combine the snapshots in :attr:`directory` into the average of another width.

        Args:
            sigma_rel: Requested width, below 0.2886, and not below the narrowest of ``sigma_rels``.
            step: Step of the requested average, within those of the snapshots. Default: the last.
            max_error: Largest accepted ``Fit.error``. The error is large between the snapshots'
                steps.

        Returns:
            The average, a :class:`modkit.posthoc.Reconstruction`: ``averages`` and ``buffers`` by
            name, the error of its ``fit``, and ``copy_to(model)``.

        Raises:
            FileNotFoundError: If there are no snapshots.
            FileError: If a file is not a snapshot, or is corrupt.
            ValueError: If the width is narrower than all snapshots or too wide, the step is outside
                of theirs, or the error is above ``max_error``.
        """
        snapshots = find_snapshots(self.directory)
        reached = [s for s in snapshots if s.step <= self.step and s.run == self._run]
        if not reached:
            raise FileNotFoundError(f"no snapshots up to step {self.step} in {self.directory}")
        return reconstruct(reached, sigma_rel, step, max_error=max_error)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle is resumed from, as a state is.
        vars(self).update(state)
        self._found = self._files()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``EMA.state_dict()``, with the id of the run as ``"run"``."""
        return {**super().state_dict(), "run": self._run}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *, step: int | None = None) -> None:
        """Resume from a state of :meth:`state_dict`, with bitwise identical results.

        The next update moves snapshots of later steps to the folder ``abandoned`` in
        :attr:`directory`: they contain models that this run will not have had.

        Args:
            state_dict: The state of averages with equal widths, of the same model. It is validated
                completely before anything changes. Tensors are copied.
            step: Not accepted: the state has its counter.

        Raises:
            ValueError: If the state is invalid, or is of averages with other widths.
            NameMismatchError: If names or shapes do not fit the model. It is a ``ValueError``.
            RuntimeError: If an average is swapped into the model.
        """
        state = Part(OWN, state_dict)
        run = state["run"]
        if not isinstance(run.value, str):
            run.refuse("the id of a run")
        schedules = [schedule.to_config() for schedule in self.schedules]
        # As text, since a tensor in the state may have no truth value.
        if repr(state["schedules"].value) != repr(schedules):
            state["schedules"].refuse(f"{schedules}, as in this object")

        super().load_state_dict(state_dict, step=step)
        self._run = run.value
        self._found = self._files()


publish("modkit", PostHocEMA)
publish("modkit.posthoc", *(globals()[_name] for _name in __all__))
