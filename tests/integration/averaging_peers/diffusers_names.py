"""diffusers' names, on diffusers itself and on modkit."""

# ruff: noqa: D102 - the library's documentation says what its names do

import importlib
from pathlib import Path

import modkit
from modkit.schedules import CountWarmup


class OnDiffusers:
    """`diffusers.training_utils.EMAModel`."""

    def __init__(self, model, decay=0.9999, *, foreach=False):
        self.ema = self._library().EMAModel(
            model.parameters(),
            decay=decay,
            foreach=foreach,
            model_cls=type(model),
            model_config=model.config,
        )
        self.save_pretrained = self.ema.save_pretrained

    @staticmethod
    def _library():
        return importlib.import_module("diffusers.training_utils")

    @classmethod
    def from_pretrained(cls, path, model_cls, *, foreach=False):
        loaded = cls.__new__(cls)
        loaded.ema = cls._library().EMAModel.from_pretrained(path, model_cls, foreach=foreach)
        return loaded

    @property
    def optimization_step(self):
        return self.ema.optimization_step

    @property
    def shadow_params(self):
        return self.ema.shadow_params

    def step(self, model):
        self.ema.step(model.parameters())


class OnModkit:
    """`modkit.EMA`, with the warmup by count that is diffusers' default."""

    def __init__(self, model, decay=0.9999, *, foreach=False):
        # modkit always takes the foreach kernels where there are any.
        self.ema = modkit.EMA(model, schedule=CountWarmup(decay))
        self.step = self.ema.update

    @classmethod
    def from_pretrained(cls, path, model_cls, *, foreach=False):
        loaded = cls(model_cls.from_pretrained(path), foreach=foreach)
        loaded.ema.load_state_dict(modkit.load_checkpoint(Path(path, "ema.pt")))
        return loaded

    @property
    def optimization_step(self):
        return self.ema.step

    @property
    def shadow_params(self):
        return list(self.ema.averaged_model().parameters())

    def save_pretrained(self, path):
        self.ema.averaged_model().save_pretrained(path)
        modkit.save_checkpoint(self.ema.state_dict(), Path(path, "ema.pt"))
