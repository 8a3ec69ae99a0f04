"""``EMA.to()``: averages are moved and cast while they run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.unit.averaging.recipes import PRECISIONS, walk


# Of one rounding, relative.
ROUNDING = {
    torch.float64: 2**-52,
    torch.float32: 2**-23,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


def layers(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Return small layers of one shape, and one of another."""
    return nn.ModuleList([*(nn.Linear(3, 3) for _ in range(5)), nn.Linear(40, 50)]).to(dtype)


def values(ema: "modkit.EMA[Any]", index: int = 0) -> dict[str, Tensor]:
    """Return copies of the averages, in float64."""
    return {name: tensor.double() for name, tensor in ema.named_averages(index)}


def after(ema: "modkit.EMA[Any]", first: int, last: int) -> None:
    """Take the steps from ``first`` up to ``last``."""
    for seed in range(first, last):
        walk(ema.model, seed)
        ema.update()


WIDE = ["fp32", "fp64"]
# Each precision with the dtypes that its averages can be cast to.
CASTS = [(precision, torch.float64) for precision in PRECISIONS] + [
    (precision, dtype)
    for precision in PRECISIONS
    for dtype in (torch.float16, torch.bfloat16)
    if precision not in WIDE
]


@for_each(("precision", "dtype"), CASTS)
@for_each("begun", [False, True])
def test_to_a_dtype(precision: Any, dtype: torch.dtype, begun: bool) -> None:
    """Values change by one rounding, and all later averages have that dtype."""
    ema = modkit.EMA(layers(), decay=[0.9, 0.5], precision=precision)
    if begun:
        after(ema, 0, 4)
    before = values(ema)
    assert ema.to(dtype=dtype) is ema
    for name, value in values(ema).items():
        torch.testing.assert_close(value, before[name], rtol=ROUNDING[dtype], atol=1e-6)
    after(ema, 4, 6)
    for index in range(2):
        assert {tensor.dtype for _, tensor in ema.named_averages(index)} == {dtype}


NARROW = [
    ("fp32", torch.bfloat16, torch.float32),
    ("fp32", torch.float16, torch.float32),
    ("fp64", torch.bfloat16, torch.float64),
    ("fp64", torch.float32, torch.float64),
]


@for_each(("precision", "dtype", "least"), NARROW)
@for_each("begun", [False, True])
def test_a_dtype_that_breaks_the_promise_of_the_precision(
    precision: Any, dtype: torch.dtype, least: torch.dtype, begun: bool
) -> None:
    """An average in fewer bits would stall, so the cast is refused, and the error names what to do."""
    ema = modkit.EMA(layers(), 0.999, precision=precision)
    if begun:
        after(ema, 0, 2)
    before = values(ema)
    message = (
        rf"EMA.to\(\): dtype is {dtype}, but precision='{precision}' keeps averages in {least}"
    )
    with pytest.raises(ValueError, match=rf"{message} or wider.*'stochastic'.*averaged_model\(\)"):
        ema.to("meta", dtype)

    assert ema.device is None
    assert all(value.equal(before[name]) for name, value in values(ema).items())
    after(ema, 2, 3)
    assert {tensor.dtype for _, tensor in ema.named_averages()} == {least}


@for_each(("precision", "dtype", "least"), NARROW)
def test_an_averaged_model_that_was_cast_in_mid_run(
    precision: Any, dtype: torch.dtype, least: torch.dtype
) -> None:
    """Casting is torch's, so that a copy can be exported; the next update is refused until it is undone."""
    model = layers()
    average = AveragedModel(model, precision=precision)
    average.update_parameters(model)
    average.to(dtype)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    walk(model, 1)
    message = rf"AveragedModel: 0.weight was cast to {dtype}, but precision='{precision}'"
    with pytest.raises(ValueError, match=message):
        average.update_parameters(model)

    assert all(tensor.equal(before[name]) for name, tensor in average.state_dict().items())
    average.to(least)
    average.update_parameters(model)
    assert average.n_averaged == 2


def test_to_in_inference_mode() -> None:
    """Averages that were cast there are updated outside of it."""
    ema = modkit.EMA(layers(), decay=0.9)
    after(ema, 0, 2)
    with torch.inference_mode():
        ema.to("cpu", torch.float64)
    after(ema, 2, 4)
    assert {tensor.dtype for _, tensor in ema.named_averages()} == {torch.float64}
