"""``EMA.rebind()`` adapts averages to a model that has changed, and errors before it say so."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit import schedules
from modkit._errors import NameMismatchError
from tests.unit.averaging.recipes import set_to


DECAYS = {"ema": 0.5, "bema": schedules.BEMA(0.5), "window": schedules.Window(2)}
PRECISIONS = ["fp32", "compensated", "stochastic"]
DTYPES = [torch.float32, torch.bfloat16]


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return small layers of one shape."""
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))).to(dtype)


def values(ema: "modkit.EMA[Any]") -> dict[str, Tensor]:
    """Return copies of the averages."""
    return {name: tensor.clone() for name, tensor in ema.named_averages()}


def add(model: nn.Sequential) -> None:
    """Add a layer."""
    model.append(nn.Linear(3, 3).to(model[0].weight.dtype))


def remove(model: nn.Sequential) -> None:
    """Remove a layer."""
    del model[4]


def tie(model: nn.Sequential) -> None:
    """Tie the weight of a layer to that of another."""
    model[4].weight = model[0].weight


def resize(model: nn.Sequential) -> None:
    """Replace a layer by one of another shape."""
    model[4] = nn.Linear(3, 7).to(model[0].weight.dtype)


CHANGES = [add, remove, tie, resize]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rebind(
    change: Callable[[nn.Sequential], None], decay: str, precision: Any, dtype: torch.dtype
) -> None:
    """Known averages stay bitwise the same, new ones are copies, and those that are gone are dropped."""
    model = layers(dtype)
    ema = modkit.EMA(model, schedule=DECAYS[decay], precision=precision)
    for value in (1.0, 2.0, 4.0):
        set_to(model, value)
        ema.update()
    before = values(ema)
    change(model)
    with pytest.raises(NameMismatchError):
        ema.update()
    assert all(value.equal(before[name]) for name, value in values(ema).items())
    ema.rebind()
    rebound = values(ema)
    assert rebound.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        known = name in before and before[name].shape == parameter.shape
        assert rebound[name].equal(before[name] if known else parameter.to(rebound[name].dtype))
    ema.update()
    assert ema.n_averaged == 4
    with ema.applied():
        for name, parameter in model.named_parameters():
            assert parameter.equal(values(ema)[name].to(dtype))


@pytest.mark.parametrize("decay", DECAYS)
def test_a_resized_parameter_starts_again(decay: str) -> None:
    """After a rebind it is averaged from its new values only."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ema = modkit.EMA(model, schedule=DECAYS[decay])
    set_to(model, 1.0)
    ema.update()
    ema.update()
    model[1] = nn.Linear(1, 2)
    set_to(model, 8.0)
    ema.rebind()
    ema.update()
    assert values(ema)["1.weight"].eq(8.0).all()
    assert values(ema)["0.weight"].ne(8.0).all()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("change", CHANGES)
def test_the_error_of_a_changed_model_names_rebind(change: Callable[[nn.Sequential], None]) -> None:
    """The note says which method adapts the averages."""
    model = layers()
    ema = modkit.EMA(model)
    ema.update()
    change(model)
    with pytest.raises(NameMismatchError) as caught:
        ema.update()
    assert caught.value.__notes__ == [
        "If the model has changed on purpose, call EMA.rebind() and go on."
    ]
