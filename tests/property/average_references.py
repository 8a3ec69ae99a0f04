"""Averages of recorded models in float64, written from the formulas, and how near ``EMA`` must be."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from modkit import schedules


# Returns the average of the models of all updates, the copy first; ``every`` steps lie between two.
Reference = Callable[[list[Tensor], int], Tensor]

SINGLE = torch.finfo(torch.float32).eps


def by_step(decay: Callable[[int], float]) -> Reference:
    """Return the average of ``d * average + (1 - d) * model``, with the decay of each step."""

    def average(models: list[Tensor], every: int) -> Tensor:
        result = models[0]
        for update, model in enumerate(models[1:], 1):
            last = update * every
            d = math.prod(decay(n) for n in range(last - every + 1, last + 1))
            result = d * result + (1 - d) * model
        return result

    return average


def by_update(decay: Callable[[int], float]) -> Reference:
    """Return the same average with one decay for each update, that of its last step."""

    def average(models: list[Tensor], every: int) -> Tensor:
        result = models[0]
        for update, model in enumerate(models[1:], 1):
            d = decay(update * every)
            result = d * result + (1 - d) * model
        return result

    return average


def mean_of_all(models: list[Tensor], every: int) -> Tensor:
    """Return the mean of the models of all updates."""
    return torch.stack(models).mean(0)


def power_of_time(sigma_rel: float) -> Callable[[int], float]:
    """Return the decay of EDM2, whose exponent is the largest root of a cubic (arXiv 2312.02696)."""
    cubic = [1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2]
    gamma = float(np.roots(cubic).real.max())
    return lambda n: (n / (n + 1)) ** (gamma + 1)


def ramp(n: int) -> float:
    """Return a decay that a user may have written; a module's function, so that it can be pickled."""
    return n / (n + 3)


@dataclasses.dataclass(frozen=True)
class Cosine(schedules.Schedule):
    """A schedule of a user, as BYOL has it."""

    base: float = 0.4
    steps: int = 20

    def decay_at(self, n: int) -> float:
        """Return the decay of one step."""
        return 1 - (1 - self.base) * (math.cos(math.pi * min(1, n / self.steps)) + 1) / 2


SCHEDULES: dict[str, tuple[schedules.Schedule, Reference]] = {
    "Constant": (schedules.Constant(0.9), by_step(lambda n: 0.9)),
    "HalfLife": (schedules.HalfLife(3), by_step(lambda n: 0.5 ** (1 / 3))),
    "CountWarmup": (schedules.CountWarmup(0.5), by_step(lambda n: min(0.5, (1 + n) / (10 + n)))),
    "InverseGamma": (
        schedules.InverseGamma(power=0.75),
        by_step(lambda n: min(0.9999, 1 - (1 + n) ** -0.75)),
    ),
    "Equal": (schedules.Equal(), mean_of_all),
    "Power": (schedules.Power(0.1), by_step(power_of_time(0.1))),
    "PerUpdate": (
        schedules.PerUpdate(schedules.CountWarmup(0.7)),
        by_update(lambda n: min(0.7, (1 + n) / (10 + n))),
    ),
    "Custom": (schedules.Custom(ramp), by_step(lambda n: n / (n + 3))),
    "subclass": (
        Cosine(),
        by_step(lambda n: 1 - 0.6 * (math.cos(math.pi * min(1, n / 20)) + 1) / 2),
    ),
}


def tolerance(dtype: torch.dtype, precision: str, updates: int) -> float:
    """Return the largest error of an average of values up to 1, by the documented precision.

    Each update rounds to the dtype of the average, by up to half its eps, or by a whole eps where it
    rounds at random. A low-order error term in bf16 or fp16 squares the eps; the arithmetic is in float32.
    """
    eps = torch.finfo(dtype).eps
    narrow = dtype in (torch.bfloat16, torch.float16)
    if precision == "fp64":
        eps = torch.finfo(torch.float64).eps
    elif precision == "compensated" and narrow:
        eps = max(eps**2, SINGLE)
    elif narrow and precision == "fp32":
        eps = SINGLE
    elif narrow and precision == "stochastic":
        eps *= 2
    return updates * eps / 2
