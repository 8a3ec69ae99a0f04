"""A million updates: the counts are exact, and the averages as near to float64 as the docs state."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tests.helpers import seed_everything


MILLION = 1_000_000
DECAYS = (0.999, 0.9999, 0.99999)
# The models follow each other again and again; their weights are near 1, and move by about a tenth.
PERIOD = 1_000
SPREAD = 0.1


class Case(NamedTuple):
    """One kind of average, and the statement in docs/averaging.md: the largest relative errors."""

    name: str
    dtype: torch.dtype
    make: Callable[[nn.Module], Any]
    stated: str

    def bounds(self) -> list[float]:
        """Return the errors in the statement, one per average."""
        return [float(number) for number in re.findall(r"\b\d+e-\d+", self.stated)]


def ema(precision: Any) -> Callable[[nn.Module], Any]:
    """Return a function that makes averages of this precision, one per decay."""
    return lambda model: modkit.EMA(model, DECAYS, precision=precision)


def averaged_model(model: nn.Module) -> Any:
    """Return an average by torch's interface, of one decay."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAYS[1]))


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
SHORT = '| `"fp32"`, `"same"` | float32 | 3e-6 | 5e-5 | 4e-4 |'
NOISE = '| `"stochastic"` | bf16 | 1e-1 | 1e-1 | 1e-1 |'
CASES = [
    Case("fp64", FLOAT32, ema("fp64"), '| `"fp64"` | float32 | 1e-13 | 1e-13 | 1e-13 |'),
    Case("fp32", FLOAT32, ema("fp32"), SHORT),
    Case("same", FLOAT32, ema("same"), SHORT),
    Case("fp32-bf16", BFLOAT16, ema("fp32"), '| `"fp32"` | bf16 | 3e-6 | 5e-5 | 4e-4 |'),
    Case("stochastic-bf16", BFLOAT16, ema("stochastic"), NOISE),
    Case("same-bf16", BFLOAT16, ema("same"), '| `"same"` | bf16 | 2e-1 | 2e-1 | 2e-1 |'),
    Case("AveragedModel-EMA", FLOAT32, averaged_model, "5e-5 with a decay of 0.9999"),
    Case("AveragedModel-SWA", FLOAT32, AveragedModel, "5e-4 as SWA"),
]


def weights_of(decay: float | None, updates: int) -> Tensor:
    """Return the weight of each update's model, the copy first; without a decay they are equal."""
    if decay is None:
        return torch.full((updates,), 1 / updates, dtype=torch.float64)
    ages = torch.arange(updates - 1, -1, -1, dtype=torch.float64)
    weights = (1 - decay) * decay**ages
    weights[0] = decay ** (updates - 1)
    return weights


def averages_of(average: Any) -> list[tuple[float | None, Tensor]]:
    """Return each average as one vector in float64, with its decay."""
    if isinstance(average, AveragedModel):
        decay = None if average.multi_avg_fn is None else DECAYS[1]
        return [(decay, flat(average.module.parameters()))]
    named = [average.named_averages(index) for index in range(len(DECAYS))]
    return [
        (decay, flat(tensor for _, tensor in pairs))
        for decay, pairs in zip(DECAYS, named, strict=True)
    ]


def flat(tensors: Any) -> Tensor:
    """Return all elements in one vector in float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def errors_of(case: Case, updates: int) -> list[float]:
    """Update averages of a tiny model; return their largest relative errors."""
    seed_everything()
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]).to(case.dtype)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    table = torch.randn(PERIOD, sum(sizes), dtype=torch.float64)
    table = (1 + SPREAD * table).to(case.dtype)
    rows = [
        [
            part.view_as(parameter)
            for part, parameter in zip(row.split(sizes), parameters, strict=True)
        ]
        for row in table
    ]
    average = case.make(model)
    update = average.update_parameters if isinstance(average, AveragedModel) else average.update

    with torch.no_grad():
        for step in range(updates):
            torch._foreach_copy_(parameters, rows[step % PERIOD])
            update(model)

    assert int(average.n_averaged) == updates
    if isinstance(average, modkit.EMA):
        assert average.step == updates
    errors = []
    for decay, found in averages_of(average):
        shares = torch.zeros(PERIOD, dtype=torch.float64)
        shares.index_add_(0, torch.arange(updates) % PERIOD, weights_of(decay, updates))
        expected = shares @ table.double()
        errors.append(float(((found - expected) / expected).abs().max()))
    return errors


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("updates", [1_000, pytest.param(MILLION, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_updates(case: Case, updates: int) -> None:
    """No update is lost, and rounding errors stay below those of the table."""
    errors = errors_of(case, updates)

    for error, bound in zip(errors, case.bounds(), strict=True):
        assert error <= bound
