"""Averages of the libraries themselves go on in modkit after any step, as if they had always been there."""

import importlib

import pytest
import torch

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.integration.averaging_peers import peers
from tests.unit.averaging import mid_run
from tests.unit.averaging.mid_run import DECAY, DELAYS, check_each_switch


@pytest.fixture(autouse=True)
def _float64():
    """Let ema-pytorch compute its decays in float64: it does so in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class OfLibrary(mid_run.Average):
    """The average of a library; the other base class is its equivalent in a few lines."""

    peer = None
    options = {}

    def __init__(self, model, after=0, every=1):
        super().__init__(model, after, every)
        delays = {"update_after_step": after, "update_every": every}
        chosen = {name: value for name, value in delays.items() if name in self.delays}
        try:
            self.theirs = self.peer(model, DECAY, **chosen, **self.options)
        except ModuleNotFoundError as error:
            pytest.skip(f"could not import {error.name or error}")

    def update(self):
        self.calls += 1
        self.theirs.update()

    def value(self):
        return self.theirs.values()["weight"].detach()

    def state_dict(self):
        return self.theirs.state_dict()


class EmaPytorch(OfLibrary, mid_run.EmaPytorch):
    peer = peers.EmaPytorch
    delays = ("update_after_step", "update_every")


class Diffusers(OfLibrary, mid_run.Diffusers):
    peer = peers.Diffusers
    delays = ("update_after_step",)


class WarmupPeer(peers.Diffusers):
    def make(self, model, decay, **options):
        library = importlib.import_module("diffusers.training_utils")
        return library.EMAModel(model.parameters(), decay=decay, use_ema_warmup=True, **options)


class DiffusersWithWarmup(Diffusers):
    peer = WarmupPeer

    def ours(self):
        schedule = schedules.InverseGamma(power=2 / 3, decay=DECAY)
        return modkit.EMA(self.model, schedule=schedule, update_after_step=self.after)


class TorchEma(OfLibrary, mid_run.TorchEma):
    peer = peers.TorchEma
    delays = ()


class Timm(OfLibrary, mid_run.Timm):
    peer = peers.Timm
    delays = ("update_after_step",)
    options = {"warmup": True}


class Lightning(OfLibrary, mid_run.Lightning):
    """The callback with what its Trainer calls, and the checkpoint that a Trainer writes."""

    peer = peers.Lightning
    delays = ("update_after_step", "update_every")

    def state_dict(self):
        checkpoint = self.theirs.state_dict()
        # The model here is the module's child.
        averages = {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items()}
        return {
            **checkpoint,
            "state_dict": averages,
            "global_step": self.theirs.trainer.global_step,
        }


@for_each("delay", DELAYS)
def test_ema_pytorch(delay):
    """Its state counts calls, also those that it skips."""
    check_each_switch(lambda model: EmaPytorch(model, *delay))


@for_each("after", [0, 20])
@for_each("kind", [Diffusers, DiffusersWithWarmup, Timm])
def test_a_delayed_start(kind, after):
    """Diffusers saves the delay; timm saves no counter, and so the user passes it."""
    check_each_switch(lambda model: kind(model, after))


def test_torch_ema():
    """It copies the weights when it is created."""
    check_each_switch(TorchEma)


@for_each("delay", DELAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning(delay):
    """A checkpoint holds the number of steps, and that of the averaged models."""
    check_each_switch(lambda model: Lightning(model, *delay))
