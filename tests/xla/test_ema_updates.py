from typing import Any

import pytest
import torch

import modkit
from modkit import schedules
from tests.xla.recipes import (
    HALF,
    agree,
    counted,
    end_step,
    frozen_network,
    network,
    train,
)


pytestmark = pytest.mark.xla

SCHEDULES: dict[str, Any] = {
    "Constant": schedules.Constant(0.99),
    "InverseGamma": schedules.InverseGamma(decay=0.999),
    "CountWarmup": schedules.CountWarmup(0.999),
    "Equal": schedules.Equal(),
    "Power": schedules.Power(sigma_rel=0.1),
    "PerUpdate": schedules.PerUpdate(schedules.Constant(0.99)),
    "Custom": schedules.Custom(lambda n: 1 - 1 / (n + 2)),
}
PRECISIONS = ["same", "fp32", "fp64", "stochastic"]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    **{name: {"schedule": one} for name, one in SCHEDULES.items()},
    **{precision: {"precision": precision} for precision in PRECISIONS},
    "several": {"decay": [0.9, 0.99, 0.999]},
    "several, changing": {"schedule": [schedules.Equal(), schedules.CountWarmup(0.99)]},
    "update_every": {"update_every": 2},
    "buffers averaged": {"buffers": "average"},
    "buffers ignored": {"buffers": "ignore"},
    "buffers by name": {"buffers": {"1.running_*": "average", "*": "copy"}},
    "include": {"include": "0.*"},
    "exclude": {"exclude": "3.*"},
    "skip": {"on_nonfinite": "skip"},
    "to fp32": {"precision": "fp32", "on_nonfinite": "skip"},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def averages_of(ema: "modkit.EMA[Any]", count: int) -> list[dict[str, torch.Tensor]]:
    """Return all averages by name."""
    return [dict(ema.named_averages(index)) for index in range(count)]


@each_dtype
@each_option
def test_values(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Ten steps of training give the averages that the CPU gives."""
    count = 3 if "decay" in options else 2 if isinstance(options.get("schedule"), list) else 1

    def scenario(place: torch.device) -> object:
        net = network(place, dtype)
        ema = modkit.EMA(net, **options)
        train(net, ema.update, 0, 10)
        return averages_of(ema, count), ema.n_averaged, ema.step

    agree(scenario, device, **({} if dtype is torch.float32 else HALF))


@each_dtype
@each_option
def test_no_update_reads_or_compiles(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """After the first steps the host reads nothing, and no step compiles a graph.

    The exception is stochastic rounding: torch_xla views a tensor as another dtype on the host.
    """
    net = network(device, dtype)
    ema = modkit.EMA(net, **options)
    train(net, ema.update, 0, 6)
    with counted() as counts:
        train(net, ema.update, 6, 12)

    is_rounded = options.get("precision") == "stochastic" and dtype is torch.bfloat16
    assert counts.compilations == 0
    assert (counts.reads > 0) == is_rounded
    assert ema.step == 12


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stochastic_bits_do_not_depend_on_the_device(precision: str, device: torch.device) -> None:
    """Averages of equal values draw the same noise, which XLA gets from the host."""

    def scenario(place: torch.device) -> object:
        model = torch.nn.Linear(4, 4).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(1, 2, 16).view(4, 4))
            model.bias.fill_(1.0)
        model.to(place)
        ema = modkit.EMA(model, decay=0.5, precision=precision, seed=7)
        for step in range(6):
            with torch.no_grad():
                model.weight.fill_(1 + step / 8)
            ema.update()
            end_step()
        return dict(ema.named_averages())

    agree(scenario, device, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_values_that_are_not_finite(policy: str, device: torch.device) -> None:
    """The policies give the averages of the CPU: a step is skipped, or raises before anything changes."""

    def scenario(place: torch.device) -> object:
        net = network(place)
        ema = modkit.EMA(net, decay=0.9, on_nonfinite=policy)
        train(net, ema.update, 0, 3)
        with torch.no_grad():
            net[3].bias.fill_(float("nan"))
        raised = False
        try:
            ema.update()
        except RuntimeError as error:
            raised = "not finite" in str(error)
        with torch.no_grad():
            net[3].bias.fill_(0.5)
        ema.update()
        return dict(ema.named_averages()), raised

    agree(scenario, device)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_frozen_parameters(precision: str, buffers: str, device: torch.device) -> None:
    """A model whose values do not change keeps them, although XLA shares the memory of copies."""

    def scenario(place: torch.device) -> object:
        net = frozen_network(place)
        ema = modkit.EMA(net, decay=0.9, precision=precision, buffers=buffers)
        train(net, ema.update, 0, 5)
        return dict(ema.named_averages()), net.state_dict()

    agree(scenario, device)
