"""``AveragedModel`` beyond torch: options, copies, life time, exported names."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from modkit import nn
from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tests.models import set_weight
from tests.unit.averaging.recipes import COPIES, layers


def half_average(model: torch.nn.Module, **arguments) -> AveragedModel:
    """Return an average that goes half of the way in each update."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), **arguments)


@pytest.mark.parametrize("argument", ["precision", "on_nonfinite"])
def test_unknown_choices_are_refused(argument: str) -> None:
    """The error names the argument, the choices and what was given."""
    with pytest.raises(ValueError, match=rf"AveragedModel: {argument} must be one of .*'wild'"):
        AveragedModel(nn.Linear(1, 1), **{argument: "wild"})


def test_exported_names_are_those_of_the_plain_model() -> None:
    """The averages of a compiled and data-parallel model load into the model inside."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.DataParallel(torch.compile(plain, backend="eager"))
    average = AveragedModel(wrapped)
    set_weight(plain, 3.0)
    average.update_parameters(wrapped)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other.load_state_dict(average.export_state_dict())

    assert other[0].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_an_average_leave_the_model_out(way) -> None:
    """A copied or pickled average has its own tensors alone, and the count of the original."""
    model = nn.Linear(100, 100)
    average = half_average(model)
    average.update_parameters(set_weight(model, 1.0))
    other = way(average)
    other.update_parameters(set_weight(model, 3.0))

    assert len(pickle.dumps(average)) < 1.5 * 4 * 10_100
    assert (other.module.bias[0].item(), average.module.bias[0].item()) == (2.0, 1.0)
    assert (int(other.n_averaged), int(average.n_averaged)) == (2, 1)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_function_in_the_place_of_the_device_is_named() -> None:
    """The example of torch's page fails as in torch, and a note names the keyword."""
    with pytest.raises(TypeError) as caught:
        AveragedModel(nn.Linear(1, 1), get_ema_multi_avg_fn(0.9))

    assert "pass it as multi_avg_fn=" in caught.value.__notes__[0]


# --- options that `EMA` has too ---------------------------------------------------------------------


def weights(average: "AveragedModel[Any]") -> dict[str, torch.Tensor]:
    """Return copies of what is in the averaged copy."""
    return {name: tensor.clone() for name, tensor in average.module.state_dict().items()}


@pytest.mark.parametrize("copied", [lambda average: average, *COPIES])
def test_trainable_only_is_about_the_model_when_it_is_copied(copied: Callable[[Any], Any]) -> None:
    """Freezing the average, as most recipes do, or the model later does not end the averaging."""
    model = layers()
    model[0].requires_grad_(False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), trainable_only=True)
    average.requires_grad_(False)
    average.update_parameters(model)
    average = copied(average)
    model.requires_grad_(False)
    set_weight(model, 4.0)
    average.update_parameters(model)
    for name, value in weights(average).items():
        assert value.eq(4.0 if name.startswith("0.") else 2.0).all()
