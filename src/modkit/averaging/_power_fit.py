"""How to combine power averages so that they come near another one (Karras et al. 2024, section 3.2).

The power average at step ``T`` with exponent ``g`` gives the model of time ``t`` the weight
``(g + 1) / T * (t / T) ** g``, on ``0 < t <= T``. All quantities below are integrals of products of two
such profiles, which have closed forms; an average that is updated at every step weighs each model by
the integral of its profile over that step, so they hold for it exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modkit.averaging.schedules import gamma_of


@dataclass(frozen=True)
class Fit:
    """How well some averages together come near the one that is wanted.

    Args:
        coefficients: The weight of each average; their sum is 1. Some may be negative.
        error: Distance between the wanted profile and the combined one, relative to the size of the
            wanted one (both as root mean square over time): 0 is exact, 0.01 is very good.
        bound: The largest error that a parameter can have, in units of the root mean square, over all
            steps, of the distance between that parameter and its wanted average.

    Example:
        >>> fit_power([(0.05, 900), (0.05, 1000), (0.1, 900), (0.1, 1000)], 0.1, 1000)
        Fit(coefficients=(0.0, 0.0, 0.0, 1.0), error=0.0, bound=0.0)
    """

    coefficients: tuple[float, ...]
    error: float
    bound: float


def fit_power(averages: Sequence[tuple[float, int]], sigma_rel: float, step: int) -> Fit:
    """Find the combination of power averages that comes nearest to another one.

    Args:
        averages: The ``sigma_rel`` and the step of each average at hand; one that is later than the
            wanted step gets the weight 0.
        sigma_rel: Relative width of the wanted average.
        step: The step at which it is wanted, counted like those of ``averages``.

    Returns:
        The coefficients, in the order of ``averages``, and the error of the fit.

    Raises:
        ValueError: No average is from the wanted step or before it, two of them are the same, a
            step is less than 1, or a width is not above 0 and below 0.2886.
    """
    if min([step, *(at for _, at in averages)]) < 1:
        raise ValueError("steps must be 1 or more: at step 1, an average is the first model")
    used = [index for index, (_, at) in enumerate(averages) if at <= step]
    if not used:
        raise ValueError(f"none of the {len(averages)} averages is from step {step} or before it")
    if len({averages[index] for index in used}) < len(used):
        raise ValueError("two averages have the same sigma_rel and the same step")

    coefficients = [0.0] * len(averages)
    if (sigma_rel, step) in averages:
        coefficients[averages.index((sigma_rel, step))] = 1.0
        return Fit(tuple(coefficients), 0.0, 0.0)

    gammas = torch.tensor([gamma_of(averages[index][0]) for index in used], dtype=torch.float64)
    # Time is measured in units of the wanted step, which keeps the numbers near 1.
    ends = torch.tensor([averages[index][1] for index in used], dtype=torch.float64) / step
    gamma, end = (
        torch.tensor(gamma_of(sigma_rel), dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
    )
    between = products(gammas[:, None], ends[:, None], gammas, ends)
    wanted = products(gammas, ends, gamma, end)
    solution = torch.linalg.solve(between, wanted)
    solution = solution / solution.sum()

    size = products(gamma, end, gamma, end)
    rest = solution @ between @ solution - 2 * (solution @ wanted) + size
    distance = math.sqrt(max(0.0, float(rest)))
    for index, coefficient in zip(used, solution.tolist(), strict=True):
        coefficients[index] = coefficient
    return Fit(tuple(coefficients), distance / math.sqrt(float(size)), distance)


def products(gammas: Tensor, ends: Tensor, other_gammas: Tensor, other_ends: Tensor) -> Tensor:
    """Return the integrals of products of two profiles, for exponents and ends that broadcast."""
    common = torch.minimum(ends, other_ends)
    powers = (common / ends) ** (gammas + 1) * (common / other_ends) ** (other_gammas + 1)
    return (gammas + 1) * (other_gammas + 1) / (gammas + other_gammas + 1) * powers / common
