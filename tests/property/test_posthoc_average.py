"""``PostHocEMA`` compared with the formulas of Karras et al. 2024 (arXiv 2312.02696) in float64."""

import io
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import modkit
from modkit.averaging.posthoc import fit_power
from tests.cases import for_each
from tests.helpers import freeze
from tests.property.average_models import build, has_average, move, tensors, tolerance


# Relative error of coefficients: the system of equations is ill-conditioned.
CONDITION = 1e-8


def width_of(gamma: float) -> float:
    """Return the standard deviation of ``t ** gamma`` on the unit interval (section 3.1)."""
    return math.sqrt((gamma + 1) / (gamma + 2) ** 2 / (gamma + 3))


def gamma_of(sigma_rel: float) -> float:
    """Return the exponent of a width, by bisection."""
    low, high = 0.0, 1e6
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if width_of(middle) > sigma_rel else (low, middle)
    return low


def weights_of(sigma_rel: float, updates: int) -> Tensor:
    """Return the weight of each update's model: the part of ``t ** gamma`` up to the last that it has."""
    times = torch.arange(updates + 1, dtype=torch.float64) / updates
    return (times ** (gamma_of(sigma_rel) + 1)).diff()


class Run(NamedTuple):
    """One run of training, and the average that is reconstructed."""

    model: str = "mixed"
    sigma_rels: tuple[float, ...] = (0.05, 0.1)
    snapshot_every: int = 5
    snapshots: int = 8
    stop: int = 17
    wanted: float = 0.15
    earlier: int = 0

    @property
    def steps(self) -> int:
        """Number of steps, of which the last ones are in no snapshot."""
        return self.snapshot_every * self.snapshots + 1

    def averages(self, model: nn.Module, folder: Path) -> "modkit.PostHocEMA":
        """Return fresh averages."""
        return modkit.PostHocEMA(model, folder, self.sigma_rels, snapshot_every=self.snapshot_every)


def train(
    averages: "modkit.PostHocEMA", model: nn.Module, first: int, last: int
) -> list[dict[str, Tensor]]:
    """Move the model and update from one step up to another; return the models of all steps."""
    path = []
    for step in range(first, last):
        move(model, step)
        averages.update()
        path.append({name: one.detach().clone() for name, one in tensors(model).items()})
    return path


def resumed(run: Run, folder: Path) -> tuple["modkit.PostHocEMA", nn.Module]:
    """Train with an interruption, after which new averages of an equal model load the state."""
    model = build(run.model)
    averages = run.averages(model, folder)
    stop = min(run.stop, run.steps)
    train(averages, model, 0, stop)
    file = io.BytesIO()
    torch.save(averages.state_dict(), file)
    file.seek(0)

    again = build(run.model)
    for step in range(stop):
        move(again, step)
    averages = run.averages(again, folder)
    averages.load_state_dict(torch.load(file, weights_only=True))
    train(averages, again, stop, run.steps)
    return averages, again


def check_snapshots(
    run: Run, folder: Path, path: list[dict[str, Tensor]], parameters: set[str]
) -> dict[tuple[float, int], dict[str, Tensor]]:
    """Assert that each file holds the average of its width and step; return the references."""
    references = {}
    for width in run.sigma_rels:
        for number in range(1, run.snapshots + 1):
            step = number * run.snapshot_every
            (file,) = folder.glob(f"ema-{step:010d}-{width:.6g}-*.pt")
            content = torch.load(file, weights_only=True)
            seen = path[:step]
            weights = weights_of(width, len(seen))
            averaged = {name for name in parameters if has_average(path[0][name])}
            expected = {name: mean(seen, name, weights) for name in averaged}
            references[width, step] = expected

            assert (content["step"], content["sigma_rel"]) == (step, width)
            assert content["averages"].keys() == averaged
            for name, average in content["averages"].items():
                allowed = allowance(path, name, len(seen))
                assert largest(average - expected[name]) <= allowed, (file.name, name)
            for name, buffer in content["buffers"].items():
                assert torch.equal(buffer, path[step - 1][name])
    return references


def mean(models: list[dict[str, Tensor]], name: str, weights: Tensor) -> Tensor:
    """Return the weighted mean of one tensor in float64 or complex128."""
    stacked = torch.stack([model[name] for model in models])
    wide = torch.complex128 if stacked.is_complex() else torch.float64
    return torch.tensordot(weights.to(wide), stacked.to(wide), dims=1)


def allowance(path: list[dict[str, Tensor]], name: str, updates: int) -> float:
    """Return the largest error of an average in at least float32."""
    largest_value = max(largest(model[name]) for model in path)
    return largest_value * tolerance(path[0][name].dtype, "fp32", updates)


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude of an element."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check(run: Run, folder: Path) -> None:
    """Compare snapshots and a reconstruction with the reference, and a resumed run with this one."""
    model = build(run.model)
    averages = run.averages(model, folder / "whole")
    path = train(averages, model, 0, run.steps)
    parameters = {name for name, _ in model.named_parameters()}
    references = check_snapshots(run, folder / "whole", path, parameters)

    step = run.snapshot_every * run.snapshots - run.earlier
    result = averages.reconstruct(run.wanted, step, max_error=math.inf)
    check_reconstruction(run, path, references, result)

    again, model_again = resumed(run, folder / "parts")
    found = again.reconstruct(run.wanted, step, max_error=math.inf)
    assert freeze(tensors(model_again)) == freeze(tensors(model))
    assert freeze(again.state_dict()) == freeze(averages.state_dict())
    assert contents(folder / "parts") == contents(folder / "whole")
    assert freeze(found.averages) == freeze(result.averages)
    assert freeze(found.buffers) == freeze(result.buffers)


def check_reconstruction(
    run: Run,
    path: list[dict[str, Tensor]],
    references: dict[tuple[float, int], dict[str, Tensor]],
    result: Any,
) -> None:
    """Assert that a reconstruction is the combination of the references that `fit_power` finds."""
    step = run.snapshot_every * run.snapshots - run.earlier
    usable = [
        (width, at) for width, at in sorted(references, key=lambda one: one[::-1]) if at <= step
    ]
    fit = result.fit
    share = math.fsum(map(abs, fit.coefficients))

    assert result.step == step
    assert [(one.sigma_rel, one.step) for one in result.snapshots] == usable
    assert fit == fit_power(usable, run.wanted, step)
    assert result.averages.keys() == references[usable[0]].keys()
    for name, average in result.averages.items():
        expected = sum(
            coefficient * references[one][name]
            for one, coefficient in zip(usable, fit.coefficients, strict=True)
        )
        updates = len(usable) + run.snapshots * run.snapshot_every
        allowed = share * (allowance(path, name, updates) + CONDITION * largest(average))
        assert largest(average - expected) <= allowed, name


def contents(folder: Path) -> dict[str, Any]:
    """Return the bits of all snapshots."""
    return {
        file.name: freeze(torch.load(file, weights_only=True)) for file in sorted(folder.iterdir())
    }


MODELS = ["mixed", "tied", "batch_norm", "complex_numbers", "buffers", "strided", "views"]
SAMPLE = [
    Run(),
    Run("tied", snapshot_every=15, snapshots=4, stop=20),
    Run("batch_norm", (0.03, 0.12, 0.2), wanted=0.05, earlier=2),
    Run("complex_numbers", (0.1,), wanted=0.1),
    Run("strided", (0.05, 0.25), wanted=0.25, earlier=5, stop=1),
    Run("views", wanted=0.07, snapshot_every=10, earlier=11),
]


@for_each("run", SAMPLE)
def test_a_sample_of_runs(tmp_path: Path, run: Run) -> None:
    """Snapshots and reconstructions are those of the paper, and a resumed run is bitwise identical."""
    check(run, tmp_path)


@pytest.mark.property
@given(
    st.builds(
        Run,
        st.sampled_from(MODELS),
        st.sampled_from([(0.05, 0.1), (0.03, 0.12, 0.2), (0.05,), (0.05, 0.25)]),
        snapshot_every=st.integers(2, 12),
        snapshots=st.integers(3, 10),
        stop=st.integers(1, 18),
        wanted=st.one_of(st.floats(0.05, 0.28), st.sampled_from([0.05, 0.12, 0.2, 0.25])),
        earlier=st.integers(0, 4),
    )
)
def test_random_runs(run: Run) -> None:
    """At any width and step, interval of snapshots and point of interruption."""
    with tempfile.TemporaryDirectory() as folder:
        check(run, Path(folder))
