"""``EMA.rebind()`` adapts averages to a model that has changed, and errors before it say so."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.unit.averaging.recipes import model_of, set_to


DECAYS = {"ema": 0.5}
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


@for_each("change", CHANGES)
@for_each("decay", DECAYS)
@for_each("precision", PRECISIONS)
@for_each("dtype", DTYPES)
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
@for_each("change", CHANGES)
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


# --- trainable_only --------------------------------------------------------------------------------


def test_a_parameter_that_is_frozen_later_is_averaged_still() -> None:
    """So it is after a resume, in a model where it is frozen from the beginning."""
    model = layers()
    ema = modkit.EMA(model, 0.5, trainable_only=True)
    set_to(model, 0.0)
    ema.update()
    model[0].requires_grad_(False)
    set_to(model, 4.0)
    ema.update()
    assert all(value.eq(2.0).all() for value in values(ema).values())
    resumed = modkit.EMA(model, 0.5, trainable_only=True)
    resumed.load_state_dict(ema.state_dict())
    resumed.update()
    assert len(values(resumed)) == 10
    assert all(value.eq(3.0).all() for value in values(resumed).values())


def test_a_parameter_that_is_unfrozen_later_is_an_error_until_rebind() -> None:
    """It is not left out in silence; after rebind() it starts as a copy."""
    model = layers()
    model[0].requires_grad_(False)
    ema = modkit.EMA(model, 0.5, trainable_only=True)
    set_to(model, 0.0)
    ema.update()
    assert "0.weight" not in values(ema)
    ema.update()
    model[0].requires_grad_(True)
    with pytest.raises(NameMismatchError, match=r"2 unexpected: 0\.weight, 0\.bias"):
        ema.update()
    assert ema.n_averaged == ema.step == 2
    set_to(model, 4.0)
    ema.rebind()
    ema.update()
    assert values(ema)["0.weight"].eq(4.0).all()
    assert values(ema)["1.weight"].eq(2.0).all()


@pytest.mark.parametrize("begun", [False, True])
def test_a_model_without_trainable_parameters_is_refused(begun: bool) -> None:
    """There would be nothing to average, and a later update would have nothing to go on from."""
    model = layers()
    ema = modkit.EMA(model, 0.5, trainable_only=True)
    set_to(model, 2.0)
    if begun:
        ema.update()
        del model[:5]
        model.add_module("head", nn.Linear(3, 3))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable_only"):
        ema.rebind() if begun else ema.update()
    model.requires_grad_(True)
    if begun:
        ema.rebind()
    ema.update()
    assert values(ema).keys() == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_new_parameter_must_be_finite(policy: Any) -> None:
    """Its average starts as a copy, which would never become finite."""
    model = layers()
    ema = modkit.EMA(model, 0.5, on_nonfinite=policy)
    ema.update()
    add(model)
    with torch.no_grad():
        model[5].bias[1] = float("nan")
    with pytest.raises(RuntimeError, match=r"5\.bias is not finite"):
        ema.rebind()
    assert len(values(ema)) == 10
    set_to(model, 1.0)
    ema.rebind()
    assert len(values(ema)) == 12


# --- buffers ---------------------------------------------------------------------------------------


def test_copied_buffers_may_come_and_go() -> None:
    """A buffer that is gone is not an average that misses its place in the model."""
    model = layers()
    model.register_buffer("scale", torch.ones(2))
    ema = modkit.EMA(model)
    ema.update()
    del model.scale
    ema.update()
    assert "scale" not in values(ema)
    with ema.applied():
        pass
    model.register_buffer("shift", torch.ones(2))
    ema.update()
    assert values(ema)["shift"].eq(1.0).all()


def test_the_copy_of_a_buffer_that_was_tied_stays_until_the_next_update() -> None:
    """After `rebind()` a copied buffer is there under a name that it shares by now."""
    model = model_of([1.0])
    model.register_buffer("first", torch.ones(1))
    model.register_buffer("second", torch.zeros(1))
    ema = modkit.EMA(model)
    ema.update()
    model.second = model.first
    ema.rebind()

    assert sorted(ema.state_dict()["buffers"]) == ["first", "second"]
