"""Options that ``AveragedModel`` shares with ``EMA``."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tests.cases import for_each
from tests.unit.averaging.recipes import set_to


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return small layers of one shape, all elements 0."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))).to(dtype)
    set_to(model, 0.0)
    return model


def weights(average: "AveragedModel[Any]") -> dict[str, Tensor]:
    """Return copies of what is in the averaged copy."""
    return {name: tensor.clone() for name, tensor in average.module.state_dict().items()}


COPIES = [lambda average: average, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]


@pytest.mark.parametrize("copied", COPIES, ids=["itself", "deepcopy", "pickle"])
def test_trainable_only_is_about_the_model_when_it_is_copied(copied: Callable[[Any], Any]) -> None:
    """Freezing the average, as most recipes do, or the model later does not end the averaging."""
    model = layers()
    model[0].requires_grad_(False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), trainable_only=True)
    average.requires_grad_(False)
    average.update_parameters(model)
    average = copied(average)
    model.requires_grad_(False)
    set_to(model, 4.0)
    average.update_parameters(model)
    for name, value in weights(average).items():
        assert value.eq(4.0 if name.startswith("0.") else 2.0).all()


@pytest.mark.parametrize("precision", ["stochastic", "compensated"])
def test_a_lazy_model(precision: Any) -> None:
    """A model may get its shapes after it was copied."""
    model = nn.Sequential(nn.LazyLinear(2))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), precision=precision)
    model(torch.ones(1, 3))
    set_to(model, 0.0)
    average.update_parameters(model)
    set_to(model, 4.0)
    average.update_parameters(model)
    assert all(value.eq(2.0).all() for value in weights(average).values())


@for_each("precision", ["stochastic", "compensated"])
@for_each("size", [1, 3])
def test_a_replaced_layer(precision: Any, size: int) -> None:
    """A layer of another shape, on both sides, is averaged from there on, and so are the others."""
    model = layers(torch.bfloat16)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), precision=precision)
    average.update_parameters(model)
    for side in (model, average.module):
        side[0] = nn.Linear(3, size).bfloat16()
    set_to(average.module, 0.0)
    set_to(model, 4.0)
    average.update_parameters(model)
    assert all(value.eq(2.0).all() for value in weights(average).values())
    resumed = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), precision=precision)
    resumed.load_state_dict(average.state_dict())
