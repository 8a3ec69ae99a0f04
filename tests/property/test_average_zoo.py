"""``EMA`` on models with unusual tensors, compared with a reference in float64."""

import io
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.helpers import freeze
from tests.property.zoo import ZOO, build, has_average, move, tensors


STEPS = 13
SAVED_AFTER = 6

Reference = Callable[[list[Tensor], int], Tensor]


def by_decay(decay: Callable[[int], float]) -> Reference:
    """Return the average of ``d * average + (1 - d) * model``, with the decay of each step."""

    def average(models: list[Tensor], every: int) -> Tensor:
        result = models[0]
        for update, model in enumerate(models[1:], 1):
            last = update * every
            d = math.prod(decay(n) for n in range(last - every + 1, last + 1))
            result = d * result + (1 - d) * model
        return result

    return average


def mean_of_all(models: list[Tensor], every: int) -> Tensor:
    """Return the mean of the models of all updates."""
    return torch.stack(models).mean(0)


SCHEDULES: dict[str, tuple[schedules.Schedule, Reference]] = {
    "Constant": (schedules.Constant(0.9), by_decay(lambda n: 0.9)),
    "CountWarmup": (schedules.CountWarmup(0.5), by_decay(lambda n: min(0.5, (1 + n) / (10 + n)))),
    "InverseGamma": (
        schedules.InverseGamma(power=0.75),
        by_decay(lambda n: min(0.9999, 1 - (1 + n) ** -0.75)),
    ),
    "Equal": (schedules.Equal(), mean_of_all),
}
PRECISIONS = ("same", "fp32", "fp64", "stochastic", "compensated")
INTERVALS = (1, 3)


class Case(NamedTuple):
    """One combination of the options."""

    model: str
    precision: str
    schedule: str
    every: int

    def ema(self, model: torch.nn.Module) -> "modkit.EMA":
        """Return a fresh average; buffers are copied at each update, or averaged at each third."""
        return modkit.EMA(
            model,
            schedule=SCHEDULES[self.schedule][0],
            precision=self.precision,
            update_every=self.every,
            buffers="copy" if self.every == 1 else "average",
        )


CASES = [Case(*options) for options in itertools.product(ZOO, PRECISIONS, SCHEDULES, INTERVALS)]
# About every 15th; 17 has no divisor in common with a number of options, so none is left out.
SAMPLE = CASES[::17]


def tolerance(dtype: torch.dtype, precision: str, updates: int) -> float:
    """Return the largest error of an average of values up to 1, by the documented precision.

    Each update rounds to the dtype of the average, by up to half its eps, or by a whole eps where it
    rounds at random. A low-order error term in bf16 or fp16 squares the eps; the arithmetic is in float32.
    """
    eps = torch.finfo(dtype).eps
    narrow = dtype in (torch.bfloat16, torch.float16)
    single = torch.finfo(torch.float32).eps
    if precision == "fp64":
        eps = torch.finfo(torch.float64).eps
    elif precision == "compensated" and narrow:
        eps = max(eps**2, single)
    elif narrow and precision == "fp32":
        eps = single
    elif narrow and precision == "stochastic":
        eps *= 2
    return updates * eps / 2


class Walk:
    """A model on a random walk, its average, and the history for the reference."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case.model)
        self.ema = case.ema(self.model)
        self.seen: list[dict[str, Tensor]] = []

    def go(self, first: int, last: int) -> None:
        """Take the steps from ``first`` up to ``last``, with an update after each."""
        for step in range(first, last):
            move(self.model, step)
            self.ema.update()
            if step % self.case.every == 0:
                self.seen.append({name: wide(t) for name, t in tensors(self.model).items()})

    def check(self) -> None:
        """Assert that every average is that of the reference."""
        averages = dict(self.ema.named_averages())
        current = tensors(self.model)
        parameters = dict(self.model.named_parameters())

        assert averages.keys() == current.keys()
        for name, tensor in current.items():
            models = [seen[name] for seen in self.seen]
            copied = name not in parameters and self.case.every == 1
            if copied or not has_average(tensor):
                assert torch.equal(wide(averages[name]), models[-1]), name
                continue
            expected = SCHEDULES[self.case.schedule][1](models, self.case.every)
            size = max((float(model.abs().max()) for model in models if model.numel()), default=0.0)
            allowed = size * tolerance(tensor.dtype, self.case.precision, len(models))
            error = (wide(averages[name]) - expected).abs()
            assert averages[name].shape == tensor.shape
            assert error.numel() == 0 or float(error.max()) <= allowed, name


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in float64 or complex128; integers are exact in it."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(dtype, copy=True)


def in_model_dtype(walk: Walk) -> dict[str, Tensor]:
    """Return the averages in the dtypes of the model."""
    current = tensors(walk.model)
    return {
        name: average.detach().to(current[name].dtype, copy=True)
        for name, average in walk.ema.named_averages()
    }


def values_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors(model).items()}


def check_swap(walk: Walk) -> None:
    """Assert that the model holds the averages in the block, and bitwise its own weights after it."""
    expected, before = freeze(in_model_dtype(walk)), freeze(values_of(walk.model))
    objects = [id(tensor) for tensor in tensors(walk.model).values()]
    state = freeze(walk.ema.state_dict())
    with walk.ema.applied():
        inside = freeze(values_of(walk.model))

    assert dict(inside[1]) == dict(expected[1])
    assert freeze(values_of(walk.model)) == before
    assert [id(tensor) for tensor in tensors(walk.model).values()] == objects
    assert freeze(walk.ema.state_dict()) == state


def check_averaged_model(walk: Walk) -> None:
    """Assert that a model built from the averages holds them in separate memory."""
    before = freeze(values_of(walk.model))
    made = walk.ema.averaged_model()

    assert type(made) is type(walk.model)
    assert dict(freeze(values_of(made))[1]) == dict(freeze(in_model_dtype(walk))[1])
    for name, tensor in tensors(made).items():
        if tensor.numel():
            assert tensor.data_ptr() != tensors(walk.model)[name].data_ptr()
    assert freeze(values_of(walk.model)) == before


def saved(state: dict[str, object]) -> io.BytesIO:
    """Write a state as a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def resumed(case: Case, file: io.BytesIO) -> Walk:
    """Return a walk that continues in a new average of an equal model."""
    walk = Walk(case)
    for step in range(SAVED_AFTER):
        move(walk.model, step)
    walk.ema.load_state_dict(torch.load(file, weights_only=True))
    walk.go(SAVED_AFTER, STEPS)
    return walk


def check(case: Case) -> None:
    """Walk with a save in the middle, and compare with the reference and a resumed walk."""
    walk = Walk(case)
    walk.go(0, SAVED_AFTER)
    walk.check()
    file = saved(walk.ema.state_dict())
    walk.go(SAVED_AFTER, STEPS)
    walk.check()
    check_swap(walk)
    check_averaged_model(walk)
    other = resumed(case, file)

    assert freeze(dict(other.ema.named_averages())) == freeze(dict(walk.ema.named_averages()))
    assert freeze(other.ema.state_dict()) == freeze(walk.ema.state_dict())


def name_of(case: Case) -> str:
    """Return the id of a test."""
    return "-".join(map(str, case))


@for_each("case", SAMPLE, ids=name_of)
def test_a_sample_of_the_combinations(case: Case) -> None:
    """The average equals the reference, swaps in and out, and resumes bitwise identically."""
    check(case)


@pytest.mark.property
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_all_combinations(case: Case) -> None:
    """Every model, precision, schedule and interval equals the reference."""
    check(case)


@for_each("option", range(4), ids=Case._fields)
def test_the_sample_has_every_option(option: int) -> None:
    """The default session covers every model, precision, schedule and interval."""
    assert {case[option] for case in SAMPLE} == {case[option] for case in CASES}
