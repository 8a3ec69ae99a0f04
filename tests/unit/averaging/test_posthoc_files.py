"""Snapshots of averages, and the combination of those that makes another one."""

import math
import os

import numpy as np
import pytest
import torch

from modkit.averaging.posthoc import find_snapshots, fit_power, reconstruct, save_snapshot
from modkit.errors import FileError, NameMismatchError
from modkit.schedules import Power
from tests.cases import for_each


def walk(steps, size):
    """Return a random walk, one row a step."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(steps, size, generator=generator, dtype=torch.float64).cumsum(0)


def power_average(path, sigma_rel):
    average, result = path[0], [path[0]]
    for n, point in enumerate(path[1:], start=1):
        average = torch.lerp(point, average, Power(sigma_rel)(n))
        result.append(average)
    return torch.stack(result)


def save_walk(directory, path, every=100):
    """Save snapshots of the averages with widths 0.05 and 0.1."""
    for sigma_rel in (0.05, 0.1):
        averages = power_average(path, sigma_rel)
        for step in range(every, len(path) + 1, every):
            tensors = {"weight": averages[step - 1]}
            save_snapshot(directory, tensors, step=step, sigma_rel=sigma_rel)


@for_each(
    ("sigma_rel", "step", "text"),
    [
        (0.04, None, "the width 0.04 is narrower than all snapshots: 0.05 or more"),
        (0.1, 301, "step 301 is outside of the snapshots, which are from 100 to 300"),
        (0.1, 99, "step 99 is outside of the snapshots, which are from 100 to 300"),
        (0.1, 250, "with a relative error of .* only, more than max_error=0.1.* step 200"),
        (0.29, None, "sigma_rel must be above 0 and below 0.2886, got 0.29"),
    ],
    ids=["narrower", "later", "earlier", "between", "too wide"],
)
def test_extrapolation_is_refused(tmp_path, sigma_rel, step, text):
    """A width that the snapshots cannot reconstruct is an error."""
    save_walk(tmp_path, walk(300, 4))

    with pytest.raises(ValueError, match=text):
        reconstruct(tmp_path, sigma_rel, step=step)


def test_slices_are_saved_alone(tmp_path):
    """A tensor that is a small part of a large one does not bring the rest into the file."""
    large = torch.zeros(1_000_000)

    path = save_snapshot(tmp_path, {"weight": large[10:20]}, step=1, sigma_rel=0.1).path

    assert path.stat().st_size < 10_000


def test_interrupted_write(tmp_path, monkeypatch):
    """A file whose write fails leaves the old one of that name, and nothing else, behind."""
    options = {"step": 1, "sigma_rel": 0.1}
    save_snapshot(tmp_path, {"weight": torch.ones(1)}, **options)

    def disk_full(descriptor):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="no space left"):
            save_snapshot(tmp_path, {"weight": torch.zeros(1)}, **options)

    assert len(list(tmp_path.iterdir())) == 1
    assert reconstruct(tmp_path, 0.1).averages["weight"].item() == 1


@for_each(("step", "sigma_rel"), [(0, 0.1), (-3, 0.1), (2**53 + 1, 0.1), (3, 0.3), (3, -1)])
def test_a_snapshot_that_could_not_be_read(tmp_path, step, sigma_rel):
    """It is not written: its folder could not be read any more."""
    with pytest.raises(ValueError, match=r"step must be|sigma_rel must be"):
        save_snapshot(tmp_path, {"weight": torch.ones(1)}, step=step, sigma_rel=sigma_rel)

    assert find_snapshots(tmp_path) == [*tmp_path.iterdir()] == []


def test_a_long_id_of_a_run_is_refused(tmp_path):
    """The text of the error stays short, wherever the id is from."""
    with pytest.raises(TypeError, match="at most 64 letters") as raised:
        save_snapshot(tmp_path, {"w": torch.ones(1)}, step=1, sigma_rel=0.1, run="x" * 70_000)

    assert len(str(raised.value)) < 200


def test_snapshots_of_different_models(tmp_path):
    """Files that hold other tensors than the ones before are refused by name."""
    for name, other, problem in (
        ("missing", {}, "1 missing: weight"),
        ("more", {"weight": torch.ones(1), "bias": torch.ones(1)}, "1 unexpected: bias"),
        ("shape", {"weight": torch.ones(2)}, r"weight \(\(2,\) instead of \(1,\)\)"),
    ):
        folder = tmp_path / name
        save_snapshot(folder, {"weight": torch.ones(1)}, step=1, sigma_rel=0.1)
        save_snapshot(folder, other, step=9, sigma_rel=0.1)

        with pytest.raises(NameMismatchError, match=f"does not fit .* before it: .*{problem}"):
            reconstruct(folder, 0.15, max_error=5)


@pytest.mark.parametrize("later", [torch.float32, torch.complex64])
def test_real_and_complex_snapshots_do_not_fit(later, tmp_path):
    """An average that is real in one file and complex in another is refused, with the file's name."""
    earlier = torch.complex64 if later == torch.float32 else torch.float32
    for step, dtype in ((5, earlier), (10, later)):
        save_snapshot(tmp_path, {"w": torch.ones(2, dtype=dtype)}, step=step, sigma_rel=0.1)

    with pytest.raises(FileError, match=rf"ema-0000000010.* 'w' is of {later}"):
        reconstruct(tmp_path, 0.15, max_error=9)


# --- the fit -------------------------------------------------------------------------------------


def edm2_coefficients(averages, sigma_rel, step):
    """Solve for the coefficients with the formulas of EDM2: NumPy, ratios of the two ends."""

    def exponent(width):
        return np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real.max()

    def correlation(ends, exponents, other_ends, other_exponents):
        ratio = ends / other_ends
        power = np.where(ends < other_ends, other_exponents, -exponents)
        above = (exponents + 1) * (other_exponents + 1) * ratio**power
        return above / ((exponents + other_exponents + 1) * np.maximum(ends, other_ends))

    ends = np.array([at for _, at in averages], dtype=np.float64)
    exponents = np.array([exponent(width) for width, _ in averages])
    between = correlation(ends[:, None], exponents[:, None], ends[None], exponents[None])
    wanted = correlation(ends, exponents, np.float64(step), exponent(sigma_rel))
    solution = np.linalg.solve(between, wanted)
    return solution / solution.sum()


def grid(widths, every, last):
    """Return the width and the step of snapshots at regular steps."""
    return [(width, at) for at in range(every, last + 1, every) for width in widths]


@for_each(("every", "last"), [(100, 2000), (250, 2000), (3000, 30_000)], ids=["20", "8", "10"])
@for_each("sigma_rel", [0.04, 0.07, 0.15, 0.2, 0.25])
def test_coefficients_are_those_of_edm2(every, last, sigma_rel):
    """The coefficients agree with EDM2's to ten digits, and their sum is 1."""
    averages = grid((0.05, 0.1), every, last)

    fit = fit_power(averages, sigma_rel, last)

    reference = edm2_coefficients(averages, sigma_rel, last)
    assert np.abs(np.array(fit.coefficients) - reference).max() <= 1e-10
    assert math.fsum(fit.coefficients) == pytest.approx(1, abs=1e-12)


@for_each(
    ("averages", "step", "text"),
    [
        ([(0.05, 100)], 0, "steps must be 1 or more"),
        ([(0.05, 0)], 5, "steps must be 1 or more"),
        ([(0.05, 100), (0.1, 200)], 99, "none of the 2 averages is from step 99 or before it"),
        ([(0.05, 100), (0.05, 100)], 150, "two averages have the same sigma_rel and the same step"),
        ([(0.3, 100)], 100, "sigma_rel must be above 0 and below 0.2886, got 0.3"),
    ],
    ids=["step 0", "average of step 0", "too early", "twice", "width"],
)
def test_refusals(averages, step, text):
    """A request that no combination can meet is an error with the reason."""
    with pytest.raises(ValueError, match=text):
        fit_power(averages, 0.07, step)
