"""Situations of public bug reports of 2026, each with what modkit does in it.

The test is named after the repository and the number of the report. docs/test_evidence.md lists all of
them, and names the tests that have the situations of the others.
"""

import io

import pytest
import torch
from torch import nn

import modkit
from modkit import EMA, migrations
from tests.cases import for_each


def network():
    """Make a small network with batch normalization."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def through_a_file(content):
    """Save and load."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@for_each("compiled_at", ["first", "last"])
def test_senpai_3303(compiled_at):
    """A compiled model went on evaluating with the weights from before the swap."""
    model = network().eval()
    ema = EMA(model, 0.5)
    run = torch.compile(model, backend="aot_eager")
    inputs = torch.randn(8, 4)
    if compiled_at == "first":
        run(inputs)
    for value in (1.0, 3.0):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        ema.update()
    with torch.no_grad():
        raw = run(inputs)
        with ema.applied():
            averaged = run(inputs)
        again = run(inputs)

        assert torch.allclose(averaged, ema.averaged_model()(inputs))
        assert torch.equal(raw, again)
        assert not torch.allclose(averaged, raw)


def test_miles_credit_394():
    """Averaged power-iteration vectors of spectral norm were shorter than 1, and outputs exploded."""
    model = nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = EMA(model, 0.9)
    for _ in range(30):
        optimizer.zero_grad()
        (model(torch.randn(8, 8)) - 1).square().mean().backward()
        optimizer.step()
        ema.update()

    model.eval()
    with ema.applied(), torch.no_grad():
        for layer in model:
            assert layer.weight_u.norm().item() == pytest.approx(1.0, rel=1e-5)
        averaged = model(torch.ones(1, 8)).abs().max()
    assert averaged <= 10 * model(torch.ones(1, 8)).abs().max()


def test_anemoi_core_1373():
    """A migration of a checkpoint reached the average, and not the training weights."""

    @migrations.declare({2: [migrations.rename("old.*", "new.*")]})
    class Net(modkit.nn.Module):
        def __init__(self):
            super().__init__()
            self.new = nn.Linear(2, 2)

    class Old(modkit.nn.Module):
        def __init__(self):
            super().__init__()
            self.old = nn.Linear(2, 2)

    old = Old()
    ema = EMA(old, 0.9)
    ema.update()
    with ema.applied():
        saved = through_a_file({"model": old.state_dict(), "ema": ema.state_dict()})
    saved["model"].update({name: value + 1 for name, value in saved["model"].items()})

    model = Net()
    resumed = EMA(model, 0.9)
    model.load_state_dict(saved["model"])
    with pytest.warns(UserWarning, match="its training weights are loaded"):
        resumed.load_state_dict(saved["ema"])
    assert torch.equal(model.new.weight, old.old.weight)
    assert torch.equal(dict(resumed.named_averages())["new.weight"], old.old.weight)


def test_neural_lam_739():
    """A state that was loaded before the model was moved kept the average where it was."""
    model = network()
    ema = EMA(model, 0.9, precision="same")
    ema.update()
    resumed_model = network()
    resumed = EMA(resumed_model, 0.9, precision="same")
    resumed.load_state_dict(through_a_file(ema.state_dict()))
    resumed_model.to(torch.float64)
    resumed.update()
    resumed_model.eval()
    with resumed.applied():
        assert resumed_model(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64


def test_yolo_master_26():
    """An average could not be made of a model that holds a tensor of a graph, which cannot be copied."""
    model = network().eval()
    model.last_activation = model(torch.randn(8, 4))
    ema = EMA(model, 0.9)
    ema.update()
    with ema.applied():
        model(torch.randn(8, 4))
    assert torch.equal(ema.averaged_model()[0].weight, model[0].weight)
