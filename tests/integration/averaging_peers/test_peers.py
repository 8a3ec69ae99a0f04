"""Averages of modkit beside those of the libraries, and of a task of timm's train.py."""

import copy

import pytest
import torch
from torch import nn

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.integration.averaging_peers.recipes import Run


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


STEPS = 40


def task_of(model, **options):
    """Return a task of timm with an average, as train.py makes it."""
    task = pytest.importorskip("timm.task").ClassificationTask(model, torch.nn.CrossEntropyLoss())
    task.setup_ema(decay=0.95, **options)
    return task


def ema_of(model, warmup, **options):
    """Return the average of the page."""
    schedule = schedules.InverseGamma(power=2 / 3, decay=0.95)
    return modkit.EMA(model, schedule=schedule if warmup else 0.95, **options)


def differences(task, ema):
    """Return the largest difference of each floating-point tensor of both averages."""
    theirs = task.get_trainable_module(ema=True).module.state_dict()
    ours = ema.averaged_model().state_dict()

    assert theirs.keys() == ours.keys()
    floating = [name for name, value in theirs.items() if value.is_floating_point()]
    return {name: (theirs[name] - ours[name]).abs().max().item() for name in floating}


@for_each("delay", [0, 5])
@for_each("buffers", ["average", "copy"])
@for_each("warmup", [False, True])
def test_an_average_of_train_py(warmup, buffers, delay):
    """It is that of the constructor on the page, with each option."""
    run = Run(STEPS)
    options = {"exclude_buffers": buffers == "copy", "update_after_step": delay}
    task = task_of(run.model, use_warmup=warmup, **options)
    ema = ema_of(run.model, warmup, buffers=buffers, update_after_step=delay, precision="same")

    for step in range(1, STEPS + 1):
        run.train_step()
        task.update_ema(step=step)
        ema.update()

    assert max(differences(task, ema).values()) < 1e-6


@for_each("warmup", [False, True])
def test_a_checkpoint_of_train_py(warmup):
    """A run goes on with modkit from the average that timm saved, and its number of updates."""
    run = Run(STEPS)
    task = task_of(run.model, use_warmup=warmup)
    ema = ema_of(run.model, warmup, buffers="average", precision="same")
    saved_at = 15

    for step in range(1, STEPS + 1):
        run.train_step()
        task.update_ema(step=step)
        if step == saved_at:
            saved = copy.deepcopy(task.get_checkpoint_state(ema=True))
            ema.load_state_dict(saved["state_dict_ema"], step=step)
        elif step > saved_at:
            ema.update()

    assert ema.n_averaged == STEPS
    assert max(differences(task, ema).values()) < 1e-6
