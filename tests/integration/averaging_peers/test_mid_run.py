"""Averages of the libraries themselves go on in modkit after any step, as if they had always been there."""

# ruff: noqa: D102 - the classes that they derive from say what the methods do

import importlib
from types import SimpleNamespace

import pytest
import torch

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.integration.averaging_peers.peers import timm_model_ema
from tests.unit.averaging import mid_run
from tests.unit.averaging.mid_run import DECAY, DELAYS, check_each_switch


@pytest.fixture(autouse=True)
def _float64():
    """Let ema-pytorch compute its decays in float64: it does so in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class EmaPytorch(mid_run.EmaPytorch):
    def __init__(self, model, after, every):
        super().__init__(model, after, every)
        library = pytest.importorskip("ema_pytorch")
        self.theirs = library.EMA(model, beta=DECAY, update_after_step=after, update_every=every)

    def update(self):
        self.theirs.update()

    def value(self):
        return self.theirs.ema_model.weight.detach()

    def state_dict(self):
        return self.theirs.state_dict()


class Diffusers(mid_run.Diffusers):
    warmup = False

    def __init__(self, model, after):
        super().__init__(model, after)
        library = pytest.importorskip("diffusers.training_utils")
        self.theirs = library.EMAModel(
            model.parameters(), decay=DECAY, update_after_step=after, use_ema_warmup=self.warmup
        )

    def update(self):
        self.theirs.step(self.model.parameters())

    def value(self):
        return self.theirs.shadow_params[0]

    def state_dict(self):
        return self.theirs.state_dict()


class DiffusersWithWarmup(Diffusers):
    warmup = True

    def ours(self):
        schedule = schedules.InverseGamma(power=2 / 3, decay=DECAY)
        return modkit.EMA(self.model, schedule=schedule, update_after_step=self.after)


class TorchEma(mid_run.TorchEma):
    def __init__(self, model):
        super().__init__(model)
        library = pytest.importorskip("torch_ema")
        self.theirs = library.ExponentialMovingAverage(model.parameters(), decay=DECAY)

    def update(self):
        self.theirs.update()

    def value(self):
        return self.theirs.shadow_params[0]

    def state_dict(self):
        return self.theirs.state_dict()


class Timm(mid_run.Timm):
    def __init__(self, model, after):
        super().__init__(model, after)
        try:
            library = timm_model_ema()
        except ModuleNotFoundError:
            pytest.skip("could not import 'timm'")
        self.theirs = library.ModelEmaV3(
            model, decay=DECAY, update_after_step=after, use_warmup=True
        )

    def update(self):
        self.calls += 1
        self.theirs.update(self.model, step=self.calls)

    def value(self):
        return self.theirs.module.weight.detach()

    def state_dict(self):
        return self.theirs.state_dict()


class Lightning(mid_run.Lightning):
    """The callback with what its Trainer calls, and the checkpoint that a Trainer writes."""

    def __init__(self, model, after, every):
        super().__init__(model, after, every)
        pytest.importorskip("lightning")
        library = importlib.import_module("lightning.pytorch")
        self.trainer, self.module = SimpleNamespace(global_step=0), library.LightningModule()
        self.module.net = model
        self.theirs = library.callbacks.EMAWeightAveraging(
            decay=DECAY, update_every_n_steps=every, update_starting_at_step=after
        )
        self.theirs.setup(self.trainer, self.module, "fit")

    def update(self):
        self.trainer.global_step += 1
        self.theirs.on_train_batch_end(self.trainer, self.module, None, None, 0)

    def value(self):
        return self.theirs._average_model.module.net.weight.detach()

    def state_dict(self):
        checkpoint = {"state_dict": self.module.state_dict()}
        checkpoint |= {"global_step": self.trainer.global_step}
        self.theirs.on_save_checkpoint(self.trainer, self.module, checkpoint)
        # The model here is the module's child.
        averages = {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items()}
        return {**checkpoint, "state_dict": averages}


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
