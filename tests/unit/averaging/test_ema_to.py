"""``EMA.to()`` moves averages while they run, and a cast ``AveragedModel`` is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.unit.averaging.recipes import walk


def layers(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Return small layers of one shape, and one of another."""
    return nn.ModuleList([*(nn.Linear(3, 3) for _ in range(5)), nn.Linear(40, 50)]).to(dtype)


def after(ema: "modkit.EMA[Any]", first: int, last: int) -> None:
    """Take the steps from ``first`` up to ``last``."""
    for seed in range(first, last):
        walk(ema.model, seed)
        ema.update()


NARROW = [
    ("fp32", torch.bfloat16, torch.float32),
    ("fp32", torch.float16, torch.float32),
    ("fp64", torch.bfloat16, torch.float64),
    ("fp64", torch.float32, torch.float64),
]


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
    """Averages that were moved there are updated outside of it."""
    ema = modkit.EMA(layers(torch.bfloat16), decay=0.9)
    after(ema, 0, 2)
    with torch.inference_mode():
        assert ema.to("cpu") is ema
    after(ema, 2, 4)
    assert {tensor.dtype for _, tensor in ema.named_averages()} == {torch.float32}
    assert ema.device == torch.device("cpu")
