import pytest
import torch
from torch import nn

import modkit
from modkit.schedules import (
    Constant,
    CountWarmup,
    Custom,
    Equal,
    HalfLife,
    InverseGamma,
    PerUpdate,
    Power,
    profile,
)
from tests.cases import for_each


SCHEDULES = [
    Constant(0.9),
    CountWarmup(0.999),
    Equal(),
    HalfLife(7),
    InverseGamma(power=0.75),
    Power(sigma_rel=0.1),
    Custom(lambda n: n / (n + 2)),
    PerUpdate(InverseGamma(power=0.75)),
]


def model_of(values):
    """Return a model with one parameter in double precision."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    return model


def write(model, *values):
    """Give the parameter these values."""
    with torch.no_grad():
        model.weight.copy_(torch.tensor(values, dtype=torch.float64))


@for_each("k", [1, 10])
@for_each("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_average_has_the_weights_of_the_profile(schedule, k):
    """An EMA mixes the models of its updates with just the weights that `profile` tells."""
    model = model_of([0.0])
    ema = modkit.EMA(model, schedule=schedule, update_every=k)
    values = torch.randn(30 * k + 1, generator=torch.Generator().manual_seed(0)).double()
    for value in values.tolist():
        write(model, value)
        ema.update()

    weights = torch.tensor(profile(schedule, 30 * k, update_every=k), dtype=torch.float64)

    average = dict(ema.named_averages())["weight"].item()
    assert average == pytest.approx(float(weights @ values[::k]), rel=1e-12)
