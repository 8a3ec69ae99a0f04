"""Situations of public bug reports of 2026, each with what modkit does in it.

The test is named after the repository and the number of the report. docs/test_evidence.md lists all of
them, with those that need ranks, which `tests/distributed` has.
"""

import copy
import io
import signal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modkit
from modkit import EMA, EMACallback, migrations, schedules
from modkit.errors import FileError
from tests.cases import for_each
from tests.processes import python


def network():
    """Make a small network with batch normalization."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def train(model, optimizer, batches=1):
    """Take one optimizer step over that many micro-batches."""
    optimizer.zero_grad()
    for _ in range(batches):
        (model(torch.randn(8, 4)).square().mean() / batches).backward()
    optimizer.step()


def through_a_file(content):
    """Save and load."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_lightly_train_892():
    """The counter of updates was lost at a resume, and the warm-up of the decay began again."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMA(model, schedule=schedules.CountWarmup(0.999))
    for _ in range(20):
        train(model, optimizer)
        ema.update()

    resumed = EMA(model, schedule=schedules.CountWarmup(0.999))
    resumed.load_state_dict(through_a_file(ema.state_dict()))
    train(model, optimizer)
    ema.update()
    resumed.update()

    assert resumed.decay == ema.decay == 21 / 30
    for (_, average), (_, expected) in zip(
        resumed.named_averages(), ema.named_averages(), strict=True
    ):
        assert torch.equal(average, expected)


def test_lightly_train_968():
    """A teacher was updated once per micro-batch of an accumulated step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMA(model, 0.9)
    ema.attach(optimizer)
    for _ in range(3):
        train(model, optimizer, batches=4)

    assert ema.n_averaged == 3


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


def test_lightning_21724():
    """Validation before the first update evaluated the weights from before the training."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMACallback(model, optimizer, 0.999, update_after_step=100)
    for _ in range(5):
        train(model, optimizer)
    trained = copy.deepcopy(model.state_dict())
    with ema.evaluating():
        assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.items())


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


@for_each("change", ["truncated", "empty", "text"])
@for_each("kind", ["torch", "safetensors"])
def test_ultralytics_25428_and_voice_studio_1422(kind, change, tmp_path):
    """Corrupt files raised whatever the reader happened to raise, without the name of the file."""
    path = tmp_path / f"model.{kind}"
    if kind == "torch":
        torch.save(network().state_dict(), path)
    else:
        save_file(network().state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-100], "empty": b"", "text": b"<html>"}[change])

    with pytest.raises(FileError, match="model"):
        modkit.files.verify(path)
    if kind == "torch":
        with pytest.raises(FileError, match="model"):
            modkit.load_checkpoint(path)


def test_flood_forecasting_263():
    """A checkpoint of a compiled model did not load into a plain one."""
    model = network()
    state = torch.compile(model, backend="eager").state_dict()
    loaded = modkit.nn.Sequential(*network())
    with pytest.raises(RuntimeError, match="_orig_mod") as refused:
        modkit.load_state_dict(loaded, state)
    assert "load_matching" in "".join(refused.value.__notes__)
    result = modkit.load_matching(loaded, state, strip="_orig_mod.")
    assert not result.missing
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_deepmd_kit_5420():
    """A copy that failed in the middle of a swap left a model of two halves."""
    model = network()
    ema = EMA(model, 0.5)
    ema.update()
    nn.init.constant_(model[0].weight, 3.0)
    before = copy.deepcopy(model.state_dict())
    model[3].weight = nn.Parameter(torch.zeros(5, 5))
    with pytest.raises(modkit.errors.NameMismatchError), ema.applied():
        pytest.fail("the block ran")
    assert torch.equal(model[0].weight, before["0.weight"])


SAVE_UNTIL_KILLED = """
import os, signal, sys, threading, torch, modkit
number = 0
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    number += 1
    modkit.save_checkpoint({"number": number, "weight": torch.full((200_000,), number)}, sys.argv[1])
"""


@pytest.mark.posix
def test_kermt_8_and_prime_rl_2992(tmp_path):
    """A process that was killed while saving left half a file in place of the last good one."""
    path = tmp_path / "progress.pt"
    assert python(SAVE_UNTIL_KILLED, path).returncode == -signal.SIGKILL
    found = modkit.load_checkpoint(path)
    assert torch.equal(found["weight"], torch.full((200_000,), found["number"]))
    assert found["number"] > 1


def test_yolo_master_26():
    """An average could not be made of a model that holds a tensor of a graph, which cannot be copied."""
    model = network().eval()
    model.last_activation = model(torch.randn(8, 4))
    ema = EMA(model, 0.9)
    ema.update()
    with ema.applied():
        model(torch.randn(8, 4))
    assert torch.equal(ema.averaged_model()[0].weight, model[0].weight)
