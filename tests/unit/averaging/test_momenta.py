"""Momenta and decays of other libraries as schedules, against the formulas of their sources.

The rows are those of docs/migration.md, which has each schedule as it is evaluated here.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.unit.averaging.recipes import averaged, model_of, set_to


NAMES = {"m": 0.002, "g": 30, "d": 0.98, "tau": 20.0, "k": 1, "total": 60}

Momentum = Callable[[int], float]


def mmengine(values: list[float], momentum: Momentum, interval: int = 1) -> Iterator[float]:
    """Yield the averages of mmengine: `BaseAveragedModel.update_parameters`."""
    average = 0.0
    for steps, value in enumerate(values):
        if steps == 0:
            average = value
        elif steps % interval == 0:
            weight = momentum(steps)
            average = average * (1 - weight) + value * weight
        yield average


def from_the_start(values: list[float], decay: Momentum) -> Iterator[float]:
    """Yield averages that begin as a copy of the first value, in libraries that copy on creation."""
    average = values[0]
    yield average
    for updates, value in enumerate(values[1:], 1):
        average = decay(updates) * average + (1 - decay(updates)) * value
        yield average


def constant(m: float, k: int) -> Any:
    """Return the rule of `ExponentialMovingAverage`."""
    return lambda values: mmengine(values, lambda steps: m, k)


def stochastic(k: int) -> Any:
    """Return the rule of `StochasticWeightAverage`."""
    return lambda values: mmengine(values, lambda steps: 1 / (steps // k + 1), k)


def annealed(m: float, g: int) -> Any:
    """Return the rule of `MomentumAnnealingEMA`."""
    return lambda values: mmengine(values, lambda steps: max(m, g / (g + steps)))


def exponential(m: float, g: int) -> Any:
    """Return the rule of mmdetection's `ExpMomentumEMA`."""
    return lambda values: mmengine(
        values, lambda steps: (1 - m) * math.exp(-float(1 + steps) / g) + m
    )


def ultralytics(d: float, tau: float) -> Any:
    """Return the rule of `ModelEMA`, which counts before it averages."""
    return lambda values: from_the_start(values, lambda updates: d * (1 - math.exp(-updates / tau)))


def byol(tau: float, total: int) -> Any:
    """Return the rule of `BYOLMAWeightUpdate`, which averages before it takes the next decay."""
    return lambda values: from_the_start(
        values,
        lambda updates: 1 - (1 - tau) * (math.cos(math.pi * (updates - 1) / total) + 1) / 2,
    )


def lightning(d: float, k: int) -> Any:
    """Return the rule of `EMAWeightAveraging`, whose steps begin at 0."""
    return lambda values: mmengine(values, lambda steps: 1 - d, k)


def keras(d: float) -> Any:
    """Return the rule of `_update_model_variables_moving_average`."""

    def run(values: list[float]) -> Iterator[float]:
        average = 0.0
        for iterations, value in enumerate(values):
            momentum = d * (iterations != 0)
            average = momentum * average + (1 - momentum) * value
            yield average

    return run


def optax(d: float) -> Any:
    """Return the rule of `optax.ema` with `debias=True`."""

    def run(values: list[float]) -> Iterator[float]:
        ema = 0.0
        for count, value in enumerate(values, 1):
            ema = d * ema + (1 - d) * value
            yield ema / (1 - d**count)

    return run


ROWS: list[tuple[str, Any]] = [
    ("schedule=schedules.PerUpdate(1 - m), update_every=k", constant),
    ("schedule=schedules.Equal(), update_every=k", stochastic),
    ("schedule=lambda n: 1 - max(m, g / (g + n))", annealed),
    ("schedule=lambda n: (1 - m) * (1 - math.exp(-(1 + n) / g))", exponential),
    ("schedule=lambda n: d * (1 - math.exp(-n / tau))", ultralytics),
    ("schedule=schedules.PerUpdate(d), update_every=k", lightning),
    (
        "schedule=lambda n: 1 - (1 - tau) * (math.cos(math.pi * (n - 1) / total) + 1) / 2",
        byol,
    ),
    ("schedule=d", keras),
    ("schedule=lambda n: d * (1 - d**n) / (1 - d ** (n + 1))", optax),
]


def rule_of(make: Any, names: dict[str, float]) -> Any:
    """Return the rule of a row, with those of the numbers that it takes."""
    code = make.__code__
    return make(*(names[name] for name in code.co_varnames[: code.co_argcount]))


@for_each(("options", "make"), ROWS, ids=lambda row: row[1].__name__)
@for_each("k", [1, 4])
def test_a_schedule_gives_the_averages_of_the_formula(options: str, make: Any, k: int) -> None:
    """After each of 60 steps the average is that of the library, in float64."""
    names = {**NAMES, "k": k, "tau": 0.9 if make is byol else NAMES["tau"]}
    values = torch.randn(61, generator=torch.Generator().manual_seed(0)).double().tolist()
    expected = list(rule_of(make, names)(values))
    model = model_of(0.0, torch.float64)
    scope: dict[str, Any] = {"math": math, "schedules": schedules, "dict": dict, **names}
    ema = modkit.EMA(model, **eval(f"dict({options})", scope))
    found = []
    for value in values:
        set_to(model, value)
        ema.update()
        found.append(averaged(ema).item())

    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
