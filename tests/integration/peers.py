"""The averages of several libraries behind one face: made, updated, read, saved and loaded.

A library that is not installed raises ModuleNotFoundError when its average is made.
"""

# ruff: noqa: D102 - the class says what the methods do

import importlib
import importlib.util
from pathlib import Path

import torch

import modkit


def timm_model_ema():
    """Import the one file of timm that has its averages; the package around it needs torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None:
        raise ModuleNotFoundError("timm")
    file = Path(found.origin).parent / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("timm_model_ema", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Peer:
    """One average of a model. `values` gives its tensors by the model's names."""

    def __init__(self, model, decay=0.9):
        self.model = model
        self.average = self.make(model, decay)

    def update(self):
        self.average.update(self.model)

    def values(self):
        return dict(self.average.module.state_dict())

    def state_dict(self):
        return self.average.state_dict()

    def load_state_dict(self, state):
        self.average.load_state_dict(state)


class Modkit(Peer):
    def make(self, model, decay):
        return modkit.EMA(model, decay)

    def update(self):
        self.average.update()

    def values(self):
        return dict(self.average.averaged_model().state_dict())

    def swapped(self):
        return self.average.applied()


class Torch(Peer):
    def make(self, model, decay):
        library = torch.optim.swa_utils
        return library.AveragedModel(model, multi_avg_fn=library.get_ema_multi_avg_fn(decay))

    def update(self):
        self.average.update_parameters(self.model)


class Timm(Peer):
    def make(self, model, decay):
        return timm_model_ema().ModelEmaV3(model, decay=decay)


class EmaPytorch(Peer):
    def make(self, model, decay):
        library = importlib.import_module("ema_pytorch")
        return library.EMA(model, beta=decay, update_after_step=0, update_every=1)

    def update(self):
        self.average.update()

    def values(self):
        return dict(self.average.ema_model.state_dict())


class Diffusers(Peer):
    def make(self, model, decay):
        library = importlib.import_module("diffusers.training_utils")
        return library.EMAModel(model.parameters(), decay=decay)

    def update(self):
        self.average.step(self.model.parameters())

    def values(self):
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.average.shadow_params, strict=True))


class TorchEma(Diffusers):
    def make(self, model, decay):
        library = importlib.import_module("torch_ema")
        return library.ExponentialMovingAverage(model.parameters(), decay=decay)

    def update(self):
        self.average.update(self.model.parameters())

    def swapped(self):
        return self.average.average_parameters(self.model.parameters())


PEERS = {
    "modkit": Modkit,
    "torch": Torch,
    "timm": Timm,
    "ema-pytorch": EmaPytorch,
    "diffusers": Diffusers,
    "torch_ema": TorchEma,
}
