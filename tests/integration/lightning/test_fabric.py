"""Averages in a loop with Lightning Fabric, whose wrapper shows each parameter under two names."""

from pathlib import Path

import pytest
import torch

import modkit
from tests.helpers import freeze


fabric = pytest.importorskip("lightning.fabric", reason="needs Lightning: nox -s ecosystem")


def test_the_wrapper_has_the_names_of_the_model(tmp_path: Path) -> None:
    """Averages of model and wrapper are interchangeable, and swap into both; Fabric saves them."""
    runner = fabric.Fabric(accelerator="cpu", devices=1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    ema = modkit.EMA(net, decay=0.9)
    model, optimizer = runner.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ema.attach(optimizer)
    outer = modkit.EMA(model, decay=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        runner.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        outer.update()
    runner.save(tmp_path / "last.ckpt", {"model": model, "ema": ema})
    loaded = modkit.EMA(model, decay=0.9)
    runner.load(tmp_path / "last.ckpt", {"model": model, "ema": loaded})

    assert freeze(ema.state_dict()) == freeze(outer.state_dict()) == freeze(loaded.state_dict())
    with torch.no_grad():
        with ema.applied(model):
            inside = model(torch.ones(2, 4))
        assert torch.equal(inside, ema(torch.ones(2, 4)))
