"""An ``AveragedModel`` that was cast to fewer bits is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.unit.averaging.recipes import walk


def layers(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Return small layers of one shape, and one of another."""
    return nn.ModuleList([*(nn.Linear(3, 3) for _ in range(5)), nn.Linear(40, 50)]).to(dtype)


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
