import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.foreign_states import convert
from modkit.schedules import InverseGamma
from tests.integration.averaging_peers.peers import (
    Diffusers,
    EmaPytorch,
    Timm,
    Torch,
    TorchEma,
)


def network():
    """Return a small network with buffers, and a function that takes one step with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()

    return model, step


def test_a_reference_to_the_average_follows_as_in_ema_pytorch():
    """`ema.module`, kept from before the first update, holds what `ema_model` does."""
    ema_pytorch = pytest.importorskip("ema_pytorch")
    model, step = network()
    theirs = ema_pytorch.EMA(model, beta=0.9, min_value=0.9, update_after_step=0, update_every=1)
    ours = modkit.EMA(model, 0.9, buffers="average")
    references = theirs.ema_model, ours.module
    for _ in range(5):
        step()
        theirs.update()
        ours.update()
        expected, found = (one.state_dict() for one in references)

        # It leaves integers alone.
        floating = {name: one for name, one in expected.items() if one.is_floating_point()}
        torch.testing.assert_close({name: found[name] for name in floating}, floating)


GOING_ON = {
    "torch": (Torch, {"decay": 0.9}),
    "timm": (Timm, {"decay": 0.9}),
    "ema-pytorch": (EmaPytorch, {"schedule": InverseGamma(decay=0.9)}),
    "diffusers": (Diffusers, {}),
    "torch_ema": (TorchEma, {}),
}


@pytest.mark.parametrize("library", GOING_ON)
@pytest.mark.filterwarnings("ignore:EMA. the schedule is:UserWarning")
def test_going_on(library):
    """An EMA that has loaded the state of another library has its bits, and averages on as it does."""
    make, options = GOING_ON[library]
    model, step = network()
    try:
        theirs = make(model, decay=0.9)
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name or error}")
    for _ in range(7):
        step()
        theirs.update()
    ours = modkit.EMA(model, **options, buffers="ignore")
    converted = convert(theirs.state_dict(), model)
    assert converted.source == library.replace("-", "_")
    for name, value in theirs.values().items():
        assert torch.equal(converted.averages[name], value), name

    ours.load_state_dict(theirs.state_dict())
    for _ in range(5):
        step()
        theirs.update()
        ours.update()

    values = theirs.values()
    averages = dict(ours.named_averages())
    for name, _ in model.named_parameters():
        torch.testing.assert_close(averages[name], values[name], rtol=1e-5, atol=1e-6)
