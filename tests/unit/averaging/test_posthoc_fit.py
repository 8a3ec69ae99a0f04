import math

import numpy as np
import pytest
import torch

from modkit.averaging.posthoc import fit_power
from modkit.schedules import Power, profile
from tests.cases import for_each


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


def test_later_averages_are_left_out():
    """An average that is later than the wanted step gets no weight and changes no other."""
    early = grid((0.05, 0.1), 100, 1000)

    fit = fit_power([(0.05, 2000), *early, (0.1, 1100)], 0.15, 1000)

    assert fit.coefficients == (0.0, *fit_power(early, 0.15, 1000).coefficients, 0.0)


@for_each("sigma_rel", [0.03, 0.15])
def test_error_is_the_distance_of_the_profiles(sigma_rel):
    """The error is that of the weights of all steps, added up as a fine sum of a long run."""
    averages = grid((0.05, 0.1), 2000, 20_000)
    fit = fit_power(averages, sigma_rel, 20_000)

    combined = torch.zeros(20_000, dtype=torch.float64)
    for (width, at), coefficient in zip(averages, fit.coefficients, strict=True):
        weights = torch.tensor(profile(Power(width), at - 1), dtype=torch.float64)
        combined[:at] += coefficient * weights
    wanted = torch.tensor(profile(Power(sigma_rel), 19_999), dtype=torch.float64)

    distance = (combined - wanted).norm() / wanted.norm()
    assert fit.error == pytest.approx(float(distance), rel=0.01)
    assert fit.bound == pytest.approx(float((combined - wanted).norm()) * 20_000**0.5, rel=0.01)


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
