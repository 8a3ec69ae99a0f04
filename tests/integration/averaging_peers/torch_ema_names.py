"""torch_ema's names, on torch_ema itself and on modkit.

Where torch_ema takes parameters, these take the model that has them, or None for the averaged model.
"""

# ruff: noqa: D102 - the library's documentation says what its names do

import pytest

import modkit
from modkit.schedules import CountWarmup


class OnTorchEma:
    """`torch_ema.ExponentialMovingAverage`."""

    def __init__(self, model, decay, *, use_num_updates=True):
        torch_ema = pytest.importorskip("torch_ema")
        self.ema = torch_ema.ExponentialMovingAverage(
            model.parameters(), decay=decay, use_num_updates=use_num_updates
        )
        self.to = self.ema.to
        self.state_dict, self.load_state_dict = self.ema.state_dict, self.ema.load_state_dict

    @property
    def decay(self):
        return self.ema.decay

    @property
    def shadow_params(self):
        return self.ema.shadow_params

    def update(self, model=None):
        self.ema.update(model and model.parameters())

    def store(self, model=None):
        self.ema.store(model and model.parameters())

    def copy_to(self, model=None):
        self.ema.copy_to(model and model.parameters())

    def restore(self, model=None):
        self.ema.restore(model and model.parameters())

    def average_parameters(self):
        return self.ema.average_parameters()


class OnModkit:
    """`modkit.EMA`, with the dtypes of torch_ema and the update after construction that it does by itself."""

    def __init__(self, model, decay, *, use_num_updates=True):
        schedule = CountWarmup(decay) if use_num_updates else decay
        self.ema = modkit.EMA(model, schedule=schedule, precision="same")
        self.ema.update()
        self.update, self.copy_to, self.to = self.ema.update, self.ema.copy_to, self.ema.to
        self.state_dict, self.load_state_dict = self.ema.state_dict, self.ema.load_state_dict
        self.average_parameters = self.ema.applied

    @property
    def decay(self):
        return self.ema.schedules[0].decay

    @property
    def shadow_params(self):
        return [value for _, value in self.ema.named_averages()]

    def store(self, model=None):
        assert model in {None, self.ema.model}
        self.ema.store()

    def restore(self, model=None):
        assert model in {None, self.ema.model}
        self.ema.restore()
