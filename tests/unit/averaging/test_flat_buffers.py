"""Small averages share a flat buffer. Whatever moves, copies or saves them must not notice."""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import modkit
from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.unit.averaging.recipes import COPIES, PRECISIONS, averaged, layers, set_to


@for_each("copied", COPIES)
@for_each("precision", PRECISIONS)
def test_a_copy_of_an_ema_is_updated(copied: Callable[..., Any], precision: Any) -> None:
    """A copy goes on from its own tensors, rounds like the original, and leaves that alone."""
    ema = modkit.EMA(layers(torch.bfloat16), 0.5, precision=precision)
    ema.update()
    other = copied(ema)
    values = (1.0, 3.3, 0.7)
    for value in values:
        set_to(other.model, value)
        other.update()
    assert averaged(ema, "0.weight").eq(0.0).all()
    for value in values:
        set_to(ema.model, value)
        ema.update()
    for name, average in ema.named_averages():
        assert average.ne(0.0).all()
        assert averaged(other, name).equal(average)


def test_pickling_for_another_process_leaves_the_ema_intact() -> None:
    """A queue or a spawned process moves the tensors of the sender into shared memory."""
    ema = modkit.EMA(layers(), 0.5)
    ema.update()
    ForkingPickler.dumps(ema)
    set_to(ema.model, 4.0)
    ema.update()
    assert all(average.eq(2.0).all() for _, average in ema.named_averages())


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_an_averaged_model_is_updated(copied: Callable[..., Any]) -> None:
    """Its parameters are independent, and stay in shared memory where they are in it."""
    model = layers()
    average = AveragedModel(model)
    average.update_parameters(model)
    other = copied(average)
    set_to(model, 4.0)
    other.update_parameters(model)
    assert all(parameter.eq(0.0).all() for parameter in average.parameters())
    assert all(parameter.eq(2.0).all() for parameter in other.parameters())
    other.share_memory()
    # A spawned process gets shared memory.
    again = pickle.loads(ForkingPickler.dumps(other))
    assert all(parameter.is_shared() for parameter in again.parameters())
    again.update_parameters(model)
    assert all(parameter.gt(2.0).all() for parameter in other.parameters())
