"""Momenta and decays of other libraries as schedules, against the formulas of their sources.

The rows are those of docs/migration.md, which has each schedule as it is evaluated here.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.unit.averaging.recipes import averaged, model_of, set_to


M, G, D, TAU, BASE, TOTAL = 0.002, 30, 0.98, 20.0, 0.9, 60

# The schedule of the page, the names in it, and the weight that the source gives to the model of an
# update; the first model is copied.
ROWS: dict[str, tuple[str, dict[str, float], Callable[[int], float]]] = {
    # mmengine: `BaseAveragedModel.update_parameters`, each `k` steps.
    "ExponentialMovingAverage": (
        "schedule=schedules.PerUpdate(1 - m), update_every=k",
        {"m": M},
        lambda steps: M,
    ),
    "MomentumAnnealingEMA": (
        "schedule=lambda n: 1 - max(m, g / (g + n))",
        {"m": M, "g": G},
        lambda steps: max(M, G / (G + steps)),
    ),
    # mmdetection.
    "ExpMomentumEMA": (
        "schedule=lambda n: (1 - m) * (1 - math.exp(-(1 + n) / g))",
        {"m": M, "g": G},
        lambda steps: (1 - M) * math.exp(-float(1 + steps) / G) + M,
    ),
    # ultralytics: `ModelEMA`, which counts before it averages.
    "ModelEMA": (
        "schedule=lambda n: d * (1 - math.exp(-n / tau))",
        {"d": D, "tau": TAU},
        lambda updates: 1 - D * (1 - math.exp(-updates / TAU)),
    ),
    # Lightning, whose steps begin at 0.
    "EMAWeightAveraging": (
        "schedule=schedules.PerUpdate(d), update_every=k",
        {"d": D},
        lambda steps: 1 - D,
    ),
    # pl_bolts, which averages before it takes the next decay.
    "BYOLMAWeightUpdate": (
        "schedule=lambda n: 1 - (1 - tau) * (math.cos(math.pi * (n - 1) / total) + 1) / 2",
        {"tau": BASE, "total": TOTAL},
        lambda updates: (1 - BASE) * (math.cos(math.pi * (updates - 1) / TOTAL) + 1) / 2,
    ),
    # Keras: `_update_model_variables_moving_average`.
    "keras": ("schedule=d", {"d": D}, lambda iterations: 1 - D * (iterations != 0)),
}


def by_weights(values: list[float], weight: Callable[[int], float], interval: int) -> list[float]:
    """Return the averages that give this weight to the model of each interval."""
    averages = [values[0]]
    for steps, value in enumerate(values[1:], 1):
        share = weight(steps) if steps % interval == 0 else 0.0
        averages.append(averages[-1] * (1 - share) + value * share)
    return averages


def stochastic(values: list[float], k: int) -> list[float]:
    """Return the averages of mmengine's `StochasticWeightAverage`."""
    return by_weights(values, lambda steps: 1 / (steps // k + 1), k)


def optax(values: list[float], k: int) -> list[float]:
    """Return the averages of `optax.ema` with `debias=True`."""
    ema, averages = 0.0, []
    for count, value in enumerate(values, 1):
        ema = D * ema + (1 - D) * value
        averages.append(ema / (1 - D**count))
    return averages


def averages_of(options: str, names: dict[str, float], values: list[float]) -> list[float]:
    """Return the averages of modkit after each step."""
    model = model_of(0.0, torch.float64)
    scope: dict[str, Any] = {"math": math, "schedules": schedules, "dict": dict, **names}
    ema = modkit.EMA(model, **eval(f"dict({options})", scope))
    averages = []
    for value in values:
        set_to(model, value)
        ema.update()
        averages.append(averaged(ema).item())
    return averages


VALUES = torch.randn(61, generator=torch.Generator().manual_seed(0)).double().tolist()


@for_each("row", ROWS)
@for_each("k", [1, 4])
def test_a_schedule_gives_the_averages_of_the_formula(row: str, k: int) -> None:
    """After each of 60 steps the average is that of the library, in float64."""
    options, names, weight = ROWS[row]
    expected = by_weights(VALUES, weight, k if "update_every" in options else 1)

    found = averages_of(options, {**names, "k": k}, VALUES)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@for_each(
    ("options", "rule"),
    [
        ("schedule=schedules.Equal(), update_every=k", stochastic),
        ("schedule=lambda n: d * (1 - d**n) / (1 - d ** (n + 1))", optax),
    ],
)
@for_each("k", [1, 4])
def test_a_schedule_of_another_recursion(options: str, rule: Any, k: int) -> None:
    """Equal weights, and averages whose start is corrected, are those of the library too."""
    found = averages_of(options, {"d": D, "k": k}, VALUES)

    assert found == pytest.approx(rule(VALUES, k), rel=1e-12, abs=1e-12)
