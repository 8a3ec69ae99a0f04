"""``on_nonfinite="skip"``: a step that is known to be skipped has no part in the average or its count."""

import math
from typing import Any

import pytest
import torch

import modkit
from modkit import schedules
from modkit.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn
from tests.cases import for_each
from tests.unit.averaging.recipes import as_accelerator, averaged, model_of, set_to


NAN, INF = math.nan, math.inf
SCHEDULES = {
    "constant": 0.9,
    "half-life": schedules.HalfLife(3.0),
    "inverse gamma": schedules.InverseGamma(),
    "count": schedules.CountWarmup(0.99),
    "equal": schedules.Equal(),
    "power": schedules.Power(0.1),
    "per update": schedules.PerUpdate(schedules.CountWarmup(0.9)),
    "custom": lambda n: n / (n + 3),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"update_every": 3},
    {"update_every": 2, "update_after_step": 3},
]


def after(ema: "modkit.EMA[Any]", values: list[float], every: int) -> "modkit.EMA[Any]":
    """Update with each value, as often as one averaged step takes."""
    for value in values:
        set_to(ema.model, value)
        for _ in range(every):
            ema.update()
    return ema


@for_each("options", OPTIONS)
@for_each("schedule", SCHEDULES)
@for_each(
    ("precision", "dtype"),
    [
        ("same", torch.float32),
        ("fp32", torch.complex64),
        ("fp64", torch.bfloat16),
        ("compensated", torch.bfloat16),
        ("stochastic", torch.bfloat16),
    ],
)
def test_a_run_is_the_one_without_its_bad_steps(
    options: Any, schedule: str, precision: Any, dtype: torch.dtype
) -> None:
    """Skipped steps leave the averages of every schedule bitwise as if they had not been asked for."""
    every = options.get("update_every", 1)
    whole, good = (
        modkit.EMA(
            model_of([0.0, 0.0], dtype),
            schedule=SCHEDULES[schedule],
            precision=precision,
            on_nonfinite="skip",
            **options,
        )
        for _ in range(2)
    )
    for ema in whole, good:
        for _ in range(options.get("update_after_step", 0)):
            ema.update()
    after(whole, [NAN, 1.0, NAN, 3.0, INF, -INF, 2.0, 7.0, NAN], every)
    after(good, [1.0, 3.0, 2.0, 7.0], every)

    assert averaged(whole).isfinite().all()
    assert averaged(whole).equal(averaged(good))
    assert whole.n_averaged == good.n_averaged
    assert whole.step == good.step + 5 * every


@for_each("arguments", [{}, {"avg_fn": get_swa_avg_fn()}, {"multi_avg_fn": get_swa_multi_avg_fn()}])
@for_each("bad", [NAN, INF])
def test_the_equal_average_is_the_mean_of_the_finite_models(arguments: Any, bad: float) -> None:
    """Both faces agree: the mean of 1 and 3, whatever was skipped."""
    model = model_of(0.0)
    ema = modkit.EMA(model, schedule=schedules.Equal(), on_nonfinite="skip")
    average = AveragedModel(model, on_nonfinite="skip", **arguments)
    for value in bad, 1.0, bad, bad, 3.0:
        set_to(model, value)
        ema.update()
        average.update_parameters(model)

    assert averaged(ema).item() == average.module.weight.item() == 2.0
    assert ema.n_averaged == average.n_averaged == 2
    assert ema.step == 5


@for_each("options", OPTIONS)
@for_each("stop", range(1, 24))
def test_a_resumed_run_goes_on_after_skipped_steps(options: Any, stop: int) -> None:
    """A state saved anywhere, between and after bad steps, is valid and resumes bitwise."""
    values = [1.0, NAN, 3.0, INF, NAN, 2.0, 7.0, NAN, 5.0, 4.0, NAN, 6.0] * 2
    arguments = {"schedule": schedules.Equal(), "on_nonfinite": "skip", **options}
    model = model_of(0.0)
    whole, resumed = (modkit.EMA(model, **arguments) for _ in range(2))
    for number, value in enumerate(values):
        if number == stop:
            state = resumed.state_dict()
            resumed = modkit.EMA(model, **arguments)
            resumed.load_state_dict(state)
        set_to(model, value)
        whole.update()
        resumed.update()

    assert averaged(resumed).equal(averaged(whole))
    assert (resumed.step, resumed.n_averaged) == (whole.step, whole.n_averaged)


def test_an_accelerator_skips_without_telling_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not wait for the flag, so the step is skipped and counted, as documented."""
    as_accelerator(monkeypatch)
    model = model_of(0.0)
    ema = modkit.EMA(model, schedule=schedules.Equal(), on_nonfinite="skip")
    after(ema, [1.0, NAN, 4.0], 1)

    assert averaged(ema).item() == 2.0
    assert ema.n_averaged == 3
