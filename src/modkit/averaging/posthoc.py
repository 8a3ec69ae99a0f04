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
from typing_extensions import Self

from modkit._namespace import publish
from modkit.averaging.ema import EMA
from modkit.averaging.options import Device, Names, checked_count
from modkit.averaging.precision import Precision, compact, is_averaged
from modkit.averaging.schedules import Power, gamma_of
from modkit.averaging.sharding import whole_tensor
from modkit.averaging.state import OWN_POSTHOC, LoadedState, Part, stored_average
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

# Where a run began or was resumed: an id of what follows, and the step before its first update.
Branches: TypeAlias = tuple[tuple[str, int], ...]

# A double has each step up to this one.
_LAST_STEP: Final = 2**53


@dataclass(frozen=True, order=True)
class Snapshot:
    """A file with one power average. Snapshots are ordered by step, then width.

    The file is a dict that ``torch.load(weights_only=True)`` reads: ``step``, ``sigma_rel``,
    ``branches``, ``left_out``, ``averages`` and ``buffers``, the last two with tensors by name.

    Attributes:
        step: Number of training steps that the average spans, the initial copy included.
        sigma_rel: Relative width of the average, as in :class:`modkit.schedules.Power`.
        path: The file.
        branches: Which run the average is of: for its beginning, and for each resume, an id and the
            step. Empty for averages that something else than ``PostHocEMA`` has computed.
        left_out: Names of parameters of the model that the file does not have.
    """

    step: int
    sigma_rel: float
    path: Path
    branches: Branches = field(default=(), compare=False)
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        # A file of something else would make its folder one that cannot be read.
        gamma_of(self.sigma_rel)
        if not isinstance(cast("object", self.step), int) or not 0 < self.step <= _LAST_STEP:
            raise ValueError(f"step must be an int from 1 to {_LAST_STEP}, got {self.step}")
        if not all(isinstance(cast("object", name), str) for name in self.left_out):
            raise TypeError(f"left_out must be names, got {self.left_out}")

    @property
    def run(self) -> str:
        """Id of the run since it was last resumed, empty if there is none."""
        return self.branches[-1][0] if self.branches else ""

    def precedes(self, branches: Branches) -> bool:
        """Return True if a run with these branches went on from the models of this average."""
        own = len(self.branches)
        resumed = branches[own][1] if len(branches) > own else self.step
        return self.branches == branches[:own] and self.step <= resumed


def save_snapshot(
    directory: PathLike,
    averages: Mapping[str, Tensor],
    *,
    step: int,
    sigma_rel: float,
    buffers: Mapping[str, Tensor] | None = None,
    left_out: Iterable[str] = (),
    branches: Branches = (),
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
        left_out: Names of parameters of the model that are not in the snapshot. Default: none.
        branches: Which run the average is of, as in :class:`Snapshot`. Default: none.

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
    name = "-".join(["ema", f"{step:010d}", f"{sigma_rel:.6g}", *(b[0] for b in branches[-1:])])
    path = Path(directory) / f"{name}.pt"
    # Plain numbers, whatever was given: the file is read with ``weights_only=True``.
    snapshot = Snapshot(int(step), float(sigma_rel), path, branches, tuple(left_out))
    path.parent.mkdir(parents=True, exist_ok=True)

    content = {
        "step": snapshot.step,
        "sigma_rel": snapshot.sigma_rel,
        "branches": [list(branch) for branch in branches],
        "left_out": [*snapshot.left_out],
        "averages": _gathered(averages),
        "buffers": _gathered(buffers or {}),
    }
    save_checkpoint(content, path)
    return snapshot


def _fingerprint(averages: Mapping[str, Tensor], step: int, before: Branches) -> str:
    """Return an id of a run by its first snapshot, the same on all ranks without communication."""
    digest = hashlib.blake2b(repr((step, before)).encode(), digest_size=4)
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
    keys = ["step", "sigma_rel", "branches", "left_out", "averages", "buffers"]
    missing = [key for key in keys if key not in header]
    if missing:
        raise FileError(f"{path} is not a snapshot of an average: it has no {missing[0]!r}")

    try:
        branches = _branches_of(header["branches"])
        left_out = tuple(header["left_out"])
        return Snapshot(header["step"], header["sigma_rel"], path, branches, left_out)
    except (TypeError, ValueError, OverflowError) as error:
        raise FileError(f"{path} is corrupt: {error}") from error


def _branches_of(value: Any) -> Branches:
    """Return the branches in a file or state, or raise an error that says what is wrong."""
    branches = tuple((run, since) for run, since in value)
    if not all(type(run) is str and type(since) is int for run, since in branches):
        raise TypeError("its branches must be pairs of an id and a step")
    return branches


def _of_one_run(available: Sequence[Snapshot], run: str | None) -> list[Snapshot]:
    """Return the snapshots that lead to the end of one run.

    Raises:
        ValueError: If they are of several runs, or of branches of one, and ``run`` names none.
    """  # noqa: DOC501 - raised below
    parts: dict[Branches, list[Snapshot]] = {}
    for snapshot in available:
        parts.setdefault(snapshot.branches, []).append(snapshot)

    def went_on(branches: Branches) -> bool:
        # A part that was given up has snapshots of later steps than the resume.
        others = [other for other in parts if other != branches]
        return any(all(one.precedes(other) for one in parts[branches]) for other in others)

    if run is None:
        ends = [branches for branches in parts if not went_on(branches)]
    else:
        ends = [branches for branches, part in parts.items() if part[0].run == run]
    if len(ends) != 1:
        steps = ", ".join(
            f"{part[0].run!r} (steps {part[0].step} to {part[-1].step})" for part in parts.values()
        )
        problem = "the snapshots are of several runs" if run is None else f"there is no run {run!r}"
        raise ValueError(f"{problem}: {steps}. Choose one, as in run={available[-1].run!r}")
    return [snapshot for snapshot in available if snapshot.precedes(ends[0])]


@dataclass(frozen=True)
class Fit:
    """How well a combination of power averages approximates the requested one.

    Attributes:
        coefficients: The factor of each average. Their sum is 1; some may be negative.
        error: Root mean square over time of the difference of the two profiles, relative to that of
            the requested profile. 0 is exact, 0.01 is very good.
        bound: Largest error of a parameter, in units of the root mean square, over all steps, of
            its distance to its requested average.
    """

    coefficients: tuple[float, ...]
    error: float
    bound: float


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
        return Fit(tuple(float(pair == (sigma_rel, step)) for pair in averages), 0.0, 0.0)

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
    return Fit(coefficients, distance / math.sqrt(float(requested_norm)), distance)


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
        left_out: Names of parameters of the model that the snapshots do not have.
    """

    averages: dict[str, Tensor]
    buffers: dict[str, Tensor]
    sigma_rel: float
    step: int
    fit: Fit
    snapshots: tuple[Snapshot, ...]
    left_out: set[str] = field(default_factory=set[str])

    def __repr__(self) -> str:
        return (
            f"Reconstruction(sigma_rel={self.sigma_rel}, step={self.step}, "
            f"{len(self.averages)} averages, fit.error={self.fit.error:.2g})"
        )

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Write the average and the buffers into a model.

        Args:
            model: Model with the same parameters and persistent buffers, of any dtype and device.
                Parameters that ``PostHocEMA`` was told to leave out keep their values.

        Raises:
            NameMismatchError: If names or shapes differ. The model is unchanged.
        """
        values = {**self.averages, **self.buffers}
        members = NamedTensors(model).all().items()
        tensors = {
            name: member.current()
            for name, member in members
            if member.persistent and name not in self.left_out
        }
        check_match("the snapshots", shapes_of(values), shapes_of(tensors))
        for name, tensor in tensors.items():
            write(tensor, values[name])


def reconstruct(
    snapshots: PathLike | Iterable[Snapshot | PathLike],
    sigma_rel: float,
    step: int | None = None,
    *,
    max_error: float = 0.1,
    run: str | None = None,
) -> Reconstruction:
    """Combine snapshots into the power average of another width, or at another step.

    It needs neither the model nor the ``PostHocEMA`` of the training. Memory holds the sum and one
    tensor of a file.

    Args:
        snapshots: A directory, or files or snapshots. Those of one run are used, also where that
            was resumed.
        sigma_rel: Requested width, below 0.2886, and not below the narrowest of the snapshots.
        step: Step of the requested average, within those of the snapshots. Default: the last.
        max_error: Largest accepted ``Fit.error``. The error is large between the snapshots' steps.
        run: Id of the run, or of the part since its last resume, where there are several;
            ``Snapshot.run`` has it. Default: the only one.

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
    available = _of_one_run(available, run)

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
        if not is_averaged(tensor) or tensor.itemsize < 2:
            raise FileError(f"{path} is corrupt: its average {name!r} is of {tensor.dtype}")
        # Coefficients of both signs cancel, which 16 bits do not survive.
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if name in sums and wide.is_complex() != sums[name].is_complex():
            kinds = f"{wide.dtype}, and {sums[name].dtype} in the snapshots before it"
            raise FileError(f"{path} does not fit: its average {name!r} is {kinds}")
        if name in sums:
            sums[name].add_(wide, alpha=coefficient)
        else:
            sums[name] = wide * coefficient

    buffers = StateDictFile(path, "buffers")
    for name in buffers.shapes:
        result.buffers[name] = buffers.tensor(name).clone()
    result.left_out.update(snapshot.left_out)


class PostHocEMA:
    """Power averages of a model in training, with snapshots from which other widths are made later.

    Training keeps a narrow and a wide power average, and saves a snapshot of each at intervals.
    Then the average of nearly any width, at nearly any step, is a linear combination of snapshots
    (Karras et al. 2024, section 3, https://arxiv.org/abs/2312.02696). Call :meth:`update` after
    each step of the optimizer. Averages are in float32 or wider. To combine snapshots without a
    model in training, use :func:`modkit.posthoc.reconstruct`. Runs may share a folder: snapshots
    have the id of their run, and those that a resumed run has given up are set aside.

    Args:
        model: Model in training. It is neither copied nor modified.
        directory: Folder of the snapshots, created if missing.
        sigma_rels: Relative widths, above 0 and below 0.2886; no narrower average can be
            reconstructed.
        snapshot_every: Number of steps between snapshots, a multiple of ``update_every``; ten or
            more in a run make the error small. None saves in calls of :meth:`snapshot` only.
        update_every: Number of steps between updates; the width does not depend on it.
        precision: Dtype of the averages, as in :class:`~modkit.EMA`.
        device: Device of the averages. Default: that of each parameter.
        include: Globs of names, or a predicate: parameters to average. The others are not in the
            snapshots. Default: all.
        exclude: Globs of names, or a predicate: parameters to leave out.
        trainable_only: Leave out parameters that do not require gradients at the first update, as
            for LoRA.

    Raises:
        TypeError: If ``update_every`` is not an int, a width is not a number, or an option of
            :class:`~modkit.EMA` is invalid.
        ValueError: If there is no width, a width is out of range, ``update_every`` is below 1,
            ``snapshot_every`` is not a multiple of it, or an option of :class:`~modkit.EMA` is
            invalid.

    Attributes:
        directory: Folder of the snapshots.
        step: Number of steps so far.
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
    step: int
    snapshot_every: int | None

    def __init__(
        self,
        model: torch.nn.Module,
        directory: PathLike,
        sigma_rels: Sequence[float] = (0.05, 0.1),
        *,
        snapshot_every: int | None = None,
        update_every: int = 1,
        precision: Precision = "fp32",
        device: Device = None,
        include: Names = None,
        exclude: Names = None,
        trainable_only: bool = False,
    ) -> None:
        if not sigma_rels:
            raise ValueError("PostHocEMA: sigma_rels must name one width or more")
        self._update_every = checked_count("update_every", update_every, 1, "PostHocEMA")
        self.directory = Path(directory)
        self._sigma_rels = [float(sigma_rel) for sigma_rel in sigma_rels]
        if snapshot_every is not None and (snapshot_every < 1 or snapshot_every % update_every):
            raise ValueError(
                "PostHocEMA: snapshot_every must be a multiple of "
                f"update_every={update_every}, got {snapshot_every}"
            )
        self.snapshot_every = snapshot_every

        # It is updated at every step that update_every divides. As Power only depends on the ratio
        # of steps, counting updates gives the decays of all steps since the last update.
        self._ema = EMA(
            model,
            schedule=[*map(Power, self._sigma_rels)],
            buffers="ignore",
            precision=precision,
            device=device,
            include=include,
            exclude=exclude,
            trainable_only=trainable_only,
        )
        self.step = 0
        self._branches: Branches = ()
        # The step from which the next snapshot goes on as a new branch; None while one goes on.
        self._resumed_at: int | None = 0
        self._found = {*self.directory.glob("ema-*.pt")}

    def __repr__(self) -> str:
        options = f"sigma_rels={self._sigma_rels}, step={self.step}"
        return f"{type(self).__name__}({type(self._ema.model).__name__}, {options})"

    def _averages(self) -> list[dict[str, Tensor]]:
        """Return the tensors of each average by name; an empty list before the first update."""
        averages = self._ema._engine.averages if self._ema.n_averaged else []
        return [dict(average.tensors) for average in averages]

    def update(self) -> None:
        """Count a step of training, update the averages, and save snapshots if they are due.

        Call it after each step of the optimizer.

        Raises:
            NameMismatchError: If names or shapes of the model have changed. The step is not
                counted.
            RuntimeError: If an average is swapped into the model, or a parameter has no values yet.
            OSError: If a snapshot cannot be written. The step is counted.
        """
        if (self.step + 1) % self._update_every == 0:
            self._ema.update()
        if self._branches and self.step == self._resumed_at:
            self._set_aside()
        self.step += 1
        if self.snapshot_every is not None and self.step % self.snapshot_every == 0:
            self.snapshot()

    def attach(self, *optimizers: torch.optim.Optimizer) -> Self:
        """Call :meth:`update` after each step of the optimizers, until :meth:`detach`.

        Which steps count, and which optimizers are refused, is as in :meth:`EMA.attach()
        <modkit.EMA.attach>`.

        Args:
            *optimizers: All optimizers of the model.

        Returns:
            The object itself.

        Raises:
            TypeError: If the steps of an optimizer cannot be tracked.
            ValueError: If there is no optimizer, one is attached already or given twice, or one
                does not train an averaged parameter.
        """
        self._ema._attach("PostHocEMA.attach()", optimizers, self.update)
        return self

    def detach(self) -> None:
        """Stop updating after the steps of attached optimizers."""
        self._ema.detach()

    def snapshot(self) -> list[Snapshot]:
        """Save each average to a file of its own.

        Returns:
            The snapshots, in the order of ``sigma_rels``. Their step is that of the latest update.

        Raises:
            RuntimeError: Before the first update.
            OSError: If a file cannot be written.
        """
        averages = self._averages()
        if not averages:
            raise RuntimeError("PostHocEMA: there is no average to save before the first update")

        buffers: dict[str, Tensor] = {}
        left_out: list[str] = []
        # Another average may be swapped in, which has buffers of its own.
        raws = self._ema.training_weights()
        for name, member in NamedTensors(self._ema.model).all().items():
            if member.persistent and name not in averages[0]:
                if member.is_parameter and not self._ema._engine.options.chooses(member):
                    left_out.append(name)
                else:
                    buffers[name] = raws.get(name, member.current())
        # Between updates the averages are those of the latest one.
        step = self.step - self.step % self._update_every
        if self._resumed_at is not None:
            run = _fingerprint(_gathered(averages[0]), step, self._branches)
            self._branches = (*self._branches, (run, self._resumed_at))
            self._resumed_at = None
            self._set_aside()
        return [
            save_snapshot(
                self.directory,
                average,
                step=step,
                sigma_rel=width,
                buffers=buffers,
                left_out=left_out,
                branches=self._branches,
            )
            for average, width in zip(averages, self._sigma_rels, strict=True)
        ]

    def _set_aside(self) -> None:
        """Move later snapshots of this run, which a resume has given up, to a folder beside."""
        # Other ranks move the same files. What they have written since is not given up.
        for path in self._found:
            with suppress(FileNotFoundError):
                snapshot = _read_header(path)
                is_ours = snapshot.branches[: len(self._branches)] == self._branches
                if is_ours and snapshot.step > self.step:
                    target = self.directory / "abandoned" / path.name
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)

    def reconstruct(
        self, sigma_rel: float, step: int | None = None, *, max_error: float = 0.1
    ) -> Reconstruction:
        """Combine the snapshots in :attr:`directory` into the average of another width.

        Only snapshots of this run are used: not those of other runs in the folder, nor those of a
        part that was given up when the run was resumed from an earlier checkpoint.

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
        reached = [s for s in snapshots if s.step <= self.step and s.precedes(self._branches)]
        if not reached:
            raise FileNotFoundError(f"no snapshots up to step {self.step} in {self.directory}")
        return reconstruct(reached, sigma_rel, step, max_error=max_error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from.

        Returns:
            A dict of numbers, lists and tensors, which ``torch.load(weights_only=True)`` reads:
            ``step``, ``update_every``, ``sigma_rels``, ``branches`` as in
            :class:`modkit.posthoc.Snapshot`, and in ``averages`` a dict of tensors for each width,
            empty before the first update. Tensors are not copied.
        """
        return {
            "step": self.step,
            "update_every": self._update_every,
            "sigma_rels": [*self._sigma_rels],
            "branches": [list(branch) for branch in self._branches],
            "averages": self._averages(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`, with bitwise identical results.

        The next update moves snapshots of this run that are of later steps to the folder
        ``abandoned`` in :attr:`directory`: they contain models that this run will not have had.

        Args:
            state_dict: The state of averages with equal options, of the same model. It is validated
                completely before anything changes. Tensors are copied.

        Raises:
            ValueError: If the state is invalid, or is of averages with other options.
            NameMismatchError: If names or shapes do not fit the model. It is a ``ValueError``.
            RuntimeError: If an average is swapped into the model.
        """
        self._ema._check_restored("PostHocEMA.load_state_dict()", self._ema.model)
        state = Part(OWN_POSTHOC, state_dict, owner="PostHocEMA")
        step = state["step"].count(0, _LAST_STEP)
        options = {"update_every": self._update_every, "sigma_rels": self._sigma_rels}
        for name, option in options.items():
            # As text, since 1.0 and True equal 1, and a tensor in the state may have no truth
            # value.
            if repr(state[name].value) != repr(option):
                state[name].refuse(f"{option!r}, as in this object")

        branches = state["branches"].made(_branches_of)
        updates = step // self._update_every
        averages = [average.tensors() for average in state["averages"].each()]
        count = len(self._sigma_rels) if updates else 0
        if len(averages) != count:
            state["averages"].refuse(f"a list of {count} at step {step}")

        loaded = LoadedState(
            step=updates,
            start=1 if updates else None,
            n_averaged=updates,
            schedules=self._ema.schedules,
            averages=list(map(stored_average, averages)),
        )
        self._ema._load(loaded)
        self.step = step
        self._branches = branches
        self._resumed_at = step
        self._found = {*self.directory.glob("ema-*.pt")}


publish("modkit", PostHocEMA)
publish("modkit.posthoc", *(globals()[_name] for _name in __all__))
