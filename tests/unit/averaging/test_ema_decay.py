"""``EMA.decay``: the decay of the latest step, for logs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import modkit
from modkit.schedules import (
    Constant,
    CountWarmup,
    Equal,
    HalfLife,
    InverseGamma,
    PerUpdate,
    Power,
)
from tests.cases import for_each
from tests.unit.averaging.recipes import averaged, model_of, network, set_to


SCHEDULES: list[Any] = [
    Constant(0.9),
    CountWarmup(0.999),
    Equal(),
    HalfLife(7),
    InverseGamma(power=0.75),
    Power(sigma_rel=0.1),
    PerUpdate(CountWarmup(0.99)),
    lambda n: n / (n + 2),
]


def values(count: int) -> list[float]:
    """Return values for the only parameter of a model."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).double().tolist()


@for_each("schedule", SCHEDULES)
@for_each("every", [1, 3])
@for_each("after", [0, 4])
def test_it_is_the_decay_by_which_the_latest_step_averaged(
    schedule: Any, every: int, after: int
) -> None:
    """The average before and after a step, and the parameter, tell it in float64."""
    model = model_of(0.0, torch.float64)
    options: dict[str, Any] = {"update_every": every, "update_after_step": after}
    ema = modkit.EMA(model, schedule=schedule, precision="fp64", **options)
    assert ema.decay == 0.0
    before: Tensor | None = None
    decay = 0.0
    for value in values(30):
        count = ema.n_averaged
        set_to(model, value)
        ema.update()
        latest = ema.decay
        if ema.n_averaged == count:
            # Not due: still that of the step before.
            assert latest == decay
            continue
        if before is None:
            assert latest == 0.0
        else:
            mixed = latest * before + (1 - latest) * value
            torch.testing.assert_close(averaged(ema), mixed, rtol=1e-12, atol=1e-12)
        decay = latest
        before = averaged(ema).clone()

    assert 0 < ema.decay < 1


def test_it_is_a_plain_number_of_the_first_average() -> None:
    """Several averages have the decay of the first one."""
    ema = modkit.EMA(network(), [0.5, 0.9])
    ema.update()
    ema.update()

    assert (type(ema.decay), ema.decay) == (float, 0.5)


def test_a_skipped_step_has_no_decay() -> None:
    """On CPU a step that was skipped leaves the decay of the one before."""
    model = model_of(1.0)
    ema = modkit.EMA(model, schedule=Equal(), on_nonfinite="skip")
    seen = []
    for value in (1.0, 2.0, torch.nan, 3.0):
        set_to(model, value)
        ema.update()
        seen.append(ema.decay)

    assert seen == [0.0, 1 / 2, 1 / 2, 2 / 3]


def test_it_cannot_be_set_and_the_error_has_a_remedy_that_works() -> None:
    """A schedule that is assigned counts from the next update on."""
    model = model_of(1.0, torch.float64)
    ema = modkit.EMA(model, 0.5)
    ema.update()
    remedy = r"ema\.schedules\[0\] = modkit\.schedules\.Constant\(0\.99\)\.$"
    with pytest.raises(AttributeError, match=rf"EMA\.decay cannot be set to 0\.75.*{remedy}"):
        ema.decay = 0.75
    ema.schedules[0] = Constant(0.75)
    set_to(model, 2.0)
    ema.update()

    assert ema.decay == 0.75
    assert averaged(ema).item() == 1.25
