"""Post-hoc EMA: choose the width after training (Karras et al. 2024, arXiv 2312.02696).

Training keeps a narrow and a wide power average, and saves a snapshot of each at intervals. Then
the average of nearly any width, at nearly any step, is a linear combination of snapshots.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from modkit._namespace import publish
from modkit.averaging.ema import EMA
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.names import check_match, shapes_of
from modkit.averaging.precision import compact, is_averaged
from modkit.averaging.schedules import Power, gamma_of
from modkit.errors import FileError, shown
from modkit.files.checkpoint_files import state_dict_at
from modkit.files.torch_files import read_mapped, save_checkpoint


PathLike: TypeAlias = str | os.PathLike[str]

# A double has each step up to this one.
_LAST_STEP: Final = 2**53


@dataclass(frozen=True, order=True)
class Snapshot:
    """A file with a power average of ``step`` steps, the initial copy included, and width ``sigma_rel``."""

    step: int
    sigma_rel: float
    path: Path


def save_snapshot(
    directory: PathLike,
    averages: Mapping[str, Tensor],
    *,
    step: int,
    sigma_rel: float,
    buffers: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Write an average, and buffers that are not averaged, atomically to a file in a directory."""
    step, sigma_rel = int(step), float(sigma_rel)
    path = Path(directory) / f"ema-{step:010d}-{sigma_rel:.6g}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"step": step, "sigma_rel": sigma_rel}
    for part, tensors in (("averages", averages), ("buffers", buffers or {})):
        content[part] = {name: compact(one.detach().cpu()) for name, one in tensors.items()}
    save_checkpoint(content, path)
    return Snapshot(step, sigma_rel, path)


def find_snapshots(directory: PathLike) -> list[Snapshot]:
    """Return the snapshots in a directory, ordered by step and width."""
    return sorted(map(_read_facts, Path(directory).glob("ema-*.pt")))


def _read_facts(path: Path) -> Snapshot:
    content = read_mapped(path)[0]
    facts = content if isinstance(content, Mapping) else {}
    missing = [key for key in ("step", "sigma_rel", "averages", "buffers") if key not in facts]
    if missing:
        raise FileError(f"{path} is not a snapshot of an average: it has no {missing[0]!r}")

    step, sigma_rel = facts["step"], facts["sigma_rel"]
    if type(step) is not int or not 0 < step <= _LAST_STEP:
        raise FileError(f"{path} is corrupt: its step is not a number from 1 to {_LAST_STEP}")
    if type(sigma_rel) is not float:
        raise FileError(f"{path} is corrupt: its sigma_rel is not a number of type float")
    try:
        gamma_of(sigma_rel)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{path} is corrupt: {error}") from error
    return Snapshot(step, sigma_rel, path)


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each name, its verified tensor, and True if it is averaged; one in memory at a time."""
    content, checksums = read_mapped(path)
    parts = {part: state_dict_at(content, path, part)[1] for part in ("averages", "buffers")}
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            if part == "averages" and not is_averaged(tensor):
                raise FileError(f"{path} is corrupt: its average {name!r} has integers")
            checksums.check(name, tensor)
            yield name, tensor, part == "averages"


@dataclass(frozen=True)
class Fit:
    """How well a combination of averages approximates the wanted one; the coefficients sum to 1.

    ``error`` is the root mean square over time of the difference of the profiles, relative to that
    of the wanted one: 0.01 is very good. ``bound`` limits the error of a parameter, in units of the
    root mean square of its distance to the wanted average over all steps.
    """

    coefficients: tuple[float, ...]
    error: float
    bound: float


def fit_power(averages: Sequence[tuple[float, int]], sigma_rel: float, step: int) -> Fit:
    """Find the combination of power averages that is nearest to another one (section 3.2).

    The power average at step ``T`` with exponent ``g`` weighs the model of time ``t`` by
    ``(g + 1) / T * (t / T) ** g``. ``averages`` holds the ``sigma_rel`` and step of each; later ones
    get the coefficient 0.
    """
    if min([step, *(at for _, at in averages)]) < 1:
        raise ValueError("steps must be 1 or more: at step 1, an average is the first model")
    used = [pair for pair in averages if pair[1] <= step]
    if not used:
        raise ValueError(f"none of the {len(averages)} averages is from step {step} or before it")
    if len(set(used)) < len(used):
        raise ValueError("two averages have the same sigma_rel and the same step")
    if (sigma_rel, step) in used:
        return Fit(tuple(float(pair == (sigma_rel, step)) for pair in averages), 0.0, 0.0)

    # Time is measured in units of the wanted step, which keeps the numbers near 1.
    profiles = [(gamma_of(width), at / step) for width, at in used]
    gammas, ends = torch.tensor(profiles, dtype=torch.float64, device="cpu").T
    gamma, end = torch.tensor([gamma_of(sigma_rel), 1.0], dtype=torch.float64, device="cpu")
    between = _products(gammas[:, None], ends[:, None], gammas, ends)
    wanted = _products(gammas, ends, gamma, end)
    solution = torch.linalg.solve_ex(between, wanted).result
    solution = solution / solution.sum()
    if not solution.isfinite().all():
        raise ValueError("some averages are too similar to combine: leave out snapshots")

    size = _products(gamma, end, gamma, end)
    rest = solution @ between @ solution - 2 * (solution @ wanted) + size
    shares = dict(zip(used, solution.tolist(), strict=True))
    coefficients = tuple(shares.get(pair, 0.0) for pair in averages)
    distance = math.sqrt(max(0.0, float(rest)))
    return Fit(coefficients, distance / math.sqrt(float(size)), distance)


def _products(gammas: Tensor, ends: Tensor, other_gammas: Tensor, other_ends: Tensor) -> Tensor:
    # The integrals of products of two profiles; exponents and ends broadcast.
    common = torch.minimum(ends, other_ends)
    powers = (common / ends) ** (gammas + 1) * (common / other_ends) ** (other_gammas + 1)
    return (gammas + 1) * (other_gammas + 1) / (gammas + other_gammas + 1) * powers / common


@dataclass(frozen=True)
class Reconstruction:
    """An average of ``snapshots``, in float32 or wider, with the buffers of the latest of them."""

    averages: dict[str, Tensor]
    buffers: dict[str, Tensor]
    sigma_rel: float
    step: int
    fit: Fit
    snapshots: tuple[Snapshot, ...]

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Write the average and the buffers into a model with the same names and shapes."""
        own, found = {**self.averages, **self.buffers}, _persistent(model)
        check_match("the snapshots", shapes_of(own), shapes_of(found))
        for name, tensor in found.items():
            tensor.copy_(own[name])


def reconstruct(
    snapshots: PathLike | Iterable[Snapshot | PathLike],
    sigma_rel: float,
    step: int | None = None,
    *,
    max_error: float = 0.1,
) -> Reconstruction:
    """Combine snapshots into the average of another width, reading one tensor at a time.

    Args:
        snapshots: A directory, or the files.
        sigma_rel: The wanted width, below 0.2886, and not below the narrowest of the snapshots.
        step: The step of the wanted average, within those of the snapshots. Default: the last.
        max_error: The largest accepted ``Fit.error``; it is large between the snapshots' steps.
    """
    if isinstance(snapshots, (str, os.PathLike)):
        found = find_snapshots(snapshots)
    else:
        found = sorted(s if isinstance(s, Snapshot) else _read_facts(Path(s)) for s in snapshots)
    if not found:
        raise FileNotFoundError(f"no snapshots of averages in {snapshots!r}")
    first, last = found[0].step, found[-1].step
    step = last if step is None else step
    least = min(snapshot.sigma_rel for snapshot in found)
    if sigma_rel < least and not math.isclose(sigma_rel, least):
        raise ValueError(f"sigma_rel={sigma_rel} is narrower than all snapshots: {least} or more")
    if not first <= step <= last:
        span = f"which are from {first} to {last}"
        raise ValueError(f"step {step} is outside of the snapshots, {span}")
    usable = [snapshot for snapshot in found if snapshot.step <= step]
    fit = fit_power([(each.sigma_rel, each.step) for each in usable], sigma_rel, step)
    if not fit.error <= max_error:
        raise ValueError(
            f"the average with sigma_rel={sigma_rel} at step {step} can be met with a relative "
            f"error of {fit.error:.2g} only, more than max_error={max_error}. The nearest earlier "
            f"snapshot is of step {usable[-1].step}; more frequent snapshots make the error smaller"
        )
    result = Reconstruction({}, {}, sigma_rel, step, fit, tuple(usable))
    used = [pair for pair in zip(usable, fit.coefficients, strict=True) if pair[1]]
    for snapshot, share in used:
        _add(result, snapshot.path, share)
    return result


def _add(result: Reconstruction, path: Path, coefficient: float) -> None:
    """Add the averaged tensors of a file, times its coefficient, and replace the buffers."""
    sums, seen = result.averages, set[str]()
    is_first = not sums
    for name, tensor, averaged in _read_tensors(path):
        if not averaged:
            result.buffers[name] = tensor.clone()
            continue
        seen.add(name)
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if is_first:
            sums[name] = wide * coefficient
        elif name in sums and sums[name].shape == wide.shape:
            sums[name].add_(wide, alpha=coefficient)
        else:
            text = f"{path} has another tensor {name!r} than the snapshots before it"
            raise ValueError(shown(text))
    if missing := sums.keys() - seen:
        raise ValueError(shown(f"{path} has no tensor {min(missing)!r}"))


def _persistent(model: torch.nn.Module) -> dict[str, Tensor]:
    members = NamedTensors(model).all().items()
    return {name: member.current() for name, member in members if member.persistent}


class PostHocEMA:
    """Power averages of a model in training, with snapshots at intervals.

    Args:
        model: Model in training.
        directory: Folder of the snapshots, created if missing.
        sigma_rels: Relative widths, below 0.2886; no narrower average can be reconstructed.
        snapshot_every: Number of steps between snapshots, a multiple of ``update_every``; ten or
            more in a run make the error small. None saves in calls of :meth:`snapshot` only.
        update_every: Number of steps between updates; the width does not depend on it.

    Attributes:
        step: Number of steps so far.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> averages = PostHocEMA(model, tmp_path, snapshot_every=100)
        >>> for step in range(1, 1001):
        ...     weight = torch.nn.init.constant_(model.weight, step)
        ...     averages.update()
        >>> round(averages.reconstruct(sigma_rel=0.15).averages["weight"].item())
        821
    """

    directory: Path
    step: int

    def __init__(
        self,
        model: torch.nn.Module,
        directory: PathLike,
        sigma_rels: Sequence[float] = (0.05, 0.1),
        *,
        snapshot_every: int | None = None,
        update_every: int = 1,
    ) -> None:
        if not sigma_rels:
            raise ValueError("PostHocEMA: sigma_rels must name one width or more")
        if update_every < 1:
            raise ValueError(f"PostHocEMA: update_every must be 1 or more, got {update_every}")
        self.directory = Path(directory)
        self._sigma_rels = [float(sigma_rel) for sigma_rel in sigma_rels]
        self._update_every = update_every
        self.snapshot_every = snapshot_every
        # It is updated at every step that update_every divides. As Power only depends on the ratio
        # of steps, counting updates gives the decays of all steps since the last update.
        self._ema = EMA(model, schedule=[*map(Power, self._sigma_rels)], buffers="ignore")
        self.step = 0

    @property
    def snapshot_every(self) -> int | None:
        """Number of steps between snapshots, a multiple of ``update_every``, or None."""
        return self._snapshot_every

    @snapshot_every.setter
    def snapshot_every(self, value: int | None) -> None:
        if value is not None and (value < 1 or value % self._update_every):
            text = f"a multiple of update_every={self._update_every}, got {value}"
            raise ValueError(f"PostHocEMA: snapshot_every must be {text}")
        self._snapshot_every = value

    def __repr__(self) -> str:
        options = f"sigma_rels={self._sigma_rels}, step={self.step}"
        return f"{type(self).__name__}({type(self._ema.model).__name__}, {options})"

    def _tensors(self) -> list[dict[str, Tensor]]:
        averages = self._ema.state_dict()["averages"] if self._ema.n_averaged else []
        return [average["tensors"] for average in averages]

    def update(self) -> None:
        """Count a step of training; call it after each step of the optimizer."""
        if (self.step + 1) % self._update_every == 0:
            self._ema.update()
        self.step += 1
        if self.snapshot_every is not None and self.step % self.snapshot_every == 0:
            self.snapshot()

    def snapshot(self) -> list[Snapshot]:
        """Save each average to a file of its own, with the step of the latest update."""
        averages = self._tensors()
        if not averages:
            raise RuntimeError("PostHocEMA: there is no average to save before the first update")
        saved = _persistent(self._ema.model)
        buffers = {name: saved[name] for name in saved if name not in averages[0]}
        step = self.step - self.step % self._update_every
        return [
            save_snapshot(self.directory, tensors, step=step, sigma_rel=width, buffers=buffers)
            for tensors, width in zip(averages, self._sigma_rels, strict=True)
        ]

    def reconstruct(
        self, sigma_rel: float, step: int | None = None, *, max_error: float = 0.1
    ) -> Reconstruction:
        """Combine the snapshots up to the present step, as ``modkit.averaging.posthoc.reconstruct``."""
        found = [each for each in find_snapshots(self.directory) if each.step <= self.step]
        return reconstruct(found, sigma_rel, step, max_error=max_error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {
            "step": self.step,
            "update_every": self._update_every,
            "sigma_rels": [*self._sigma_rels],
            "averages": self._tensors(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`.

        Args:
            state_dict: The state of averages with equal options, of the same model.

        Raises:
            ValueError: The state is invalid or has other options, or does not fit the model. Nothing
                has been changed.
        """
        _check_state(state_dict)
        for key, own in (("sigma_rels", self._sigma_rels), ("update_every", self._update_every)):
            if state_dict[key] != own:
                found = f"{key}={state_dict[key]!r}"
                raise ValueError(f"the state is of averages with {found}, not {own!r}")
        updates = state_dict["step"] // self._update_every
        averages = state_dict["averages"] or [{} for _ in self._sigma_rels]
        state = self._ema.state_dict()
        state |= {"step": updates, "start": 1 if updates else None, "n_averaged": updates}
        state["averages"] = [{"tensors": one, "rests": {}, "generators": {}} for one in averages]
        self._ema.load_state_dict(state)
        self.step = state_dict["step"]


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a state of ``PostHocEMA`` lacks an entry, or has one of another type."""
    text = "PostHocEMA: the state is invalid"
    if not isinstance(cast("object", state), Mapping):
        raise ValueError(f"{text}: it is a {type(state).__name__}, not a mapping")  # noqa: TRY004
    kinds = {"step": int, "update_every": int, "sigma_rels": list, "averages": list}
    for key, kind in kinds.items():
        found = type(state.get(key))
        if found is not kind:
            raise ValueError(
                f"{text}: {key!r} must be of type {kind.__name__}, not {found.__name__}"
            )
    if not 0 <= state["step"] <= _LAST_STEP:
        raise ValueError(f"{text}: its step must be a number from 0 to {_LAST_STEP}")
    if not all(type(width) is float for width in state["sigma_rels"]):
        raise ValueError(f"{text}: 'sigma_rels' must hold numbers of type float")


publish("modkit", PostHocEMA)
