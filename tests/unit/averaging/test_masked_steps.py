"""``on_nonfinite="skip"``: such a step has no part in the average; accelerators take it and undo it."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit import schedules
from modkit.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import PRECISIONS, as_accelerator, averaged, model_of, set_to


BAD_STEPS = (3, 4, 8)
STEPS = 11


def network(dtype: torch.dtype) -> nn.Module:
    """Return small layers of one shape, others, and buffers, the same each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Linear(3, 600), nn.BatchNorm1d(600)).to(dtype)
    model.register_parameter("turn", nn.Parameter(torch.randn(4, dtype=torch.complex64)))
    return model


def walk(model: nn.Module, step: int) -> None:
    """Give all floating-point tensors random values; in some steps one element is not finite."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        if step in BAD_STEPS:
            bad = float("nan") if step % 2 else float("inf")
            list(model.parameters())[step % 4].view(-1)[1] = bad


def bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what two runs must have in common."""
    return {name: freeze(tensor) for name, tensor in tensors.items()}


def run_ema(dtype: torch.dtype, **options: Any) -> list[dict[str, Any]]:
    """Return the averages after each step."""
    ema = modkit.EMA(network(dtype), on_nonfinite="skip", **options)
    seen = []
    for step in range(STEPS):
        walk(ema.model, step)
        ema.update()
        seen += [bits(dict(ema.named_averages(index))) for index in range(len(options["schedule"]))]
    return seen


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("buffers", ["copy", "average"])
@for_each("precision", [one for one in PRECISIONS if one != "stochastic"])
def test_ema(precision: Any, buffers: Any, dtype: torch.dtype, monkeypatch) -> None:
    """Several averages are bitwise those of the CPU path, after each step."""
    options = {
        "schedule": [0.9, schedules.CountWarmup(0.99)],
        "precision": precision,
        "buffers": buffers,
    }
    expected = run_ema(dtype, **options)
    as_accelerator(monkeypatch)
    assert run_ema(dtype, **options) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ema_with_stochastic_rounding(dtype: torch.dtype, monkeypatch) -> None:
    """Up to the first step that is undone the bits are the same; that step changes none."""
    options = {
        "schedule": [0.9, 0.5],
        "precision": "stochastic",
        "buffers": "ignore",
    }
    expected = run_ema(dtype, **options)
    as_accelerator(monkeypatch)
    found = run_ema(dtype, **options)
    count = len(options["schedule"])
    assert found[: count * BAD_STEPS[0]] == expected[: count * BAD_STEPS[0]]
    for step in BAD_STEPS:
        for index in range(count):
            assert found[count * step + index] == found[count * (step - 1) + index]


def of_own(averages: Any, currents: Any, count: Tensor) -> None:
    """Average in lists, by a rule that rounds even where nothing moves."""
    for average, current in zip(averages, currents, strict=True):
        average.copy_(average * 0.9 + current.to(average.dtype) * 0.1)


RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "equal": dict,
    "avg_fn ema": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "avg_fn swa": lambda: {"avg_fn": get_swa_avg_fn()},
    "multi ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "multi swa": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "own": lambda: {"multi_avg_fn": of_own},
}


def run_averaged_model(dtype: torch.dtype, rule: str, **options: Any) -> list[dict[str, Any]]:
    """Return the state after each step."""
    model = network(dtype)
    average = AveragedModel(model, on_nonfinite="skip", **RULES[rule](), **options)
    seen = []
    for step in range(STEPS):
        walk(model, step)
        average.update_parameters(model)
        seen.append(bits(average.state_dict()))
    return seen


@for_each(("use_buffers", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
@for_each("precision", PRECISIONS)
@for_each("rule", RULES)
def test_averaged_model(
    rule: str, precision: Any, use_buffers: bool, dtype: torch.dtype, monkeypatch
) -> None:
    """Every rule and precision is bitwise that of the CPU path, stochastic rounding included."""
    if precision == "stochastic" and (rule == "own" or rule.startswith("avg_fn")):
        with pytest.raises(ValueError, match="works with"):
            run_averaged_model(dtype, rule, precision=precision)
        return
    options = {"precision": precision, "use_buffers": use_buffers}
    expected = run_averaged_model(dtype, rule, **options)
    as_accelerator(monkeypatch)
    assert run_averaged_model(dtype, rule, **options) == expected


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_refused_first_update_leaves_no_averages(policy: str) -> None:
    """The state is that of before: it has no tensors that were allocated for the average."""
    model = nn.Linear(2, 2)
    ema = modkit.EMA(model, 0.5, on_nonfinite=policy)
    before = ema.state_dict()
    with torch.no_grad():
        model.weight[0, 0] = torch.nan

    with pytest.raises(RuntimeError) if policy == "raise" else contextlib.nullcontext():
        ema.update()

    steps = {"step": 1} if policy == "skip" else {}
    assert ema.state_dict() == {**before, **steps}


# --- steps that are known to be skipped ----------------------------------------------------------


NAN, INF = math.nan, math.inf
SCHEDULES = {
    "constant": 0.9,
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
