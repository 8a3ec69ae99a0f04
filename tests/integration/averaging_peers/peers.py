"""The averages of several libraries behind one interface: made, updated, read and saved.

A library that is not installed raises ModuleNotFoundError when its average is made.
"""

import importlib
import importlib.util
import types
from pathlib import Path


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
    """One average of a model; `values` gives its tensors by the model's names.

    The options are `update_every`, `update_after_step` and `warmup`, where the library has them.
    """

    def __init__(self, model, decay, **options):
        self.model = model
        self.average = self.make(model, decay, **options)

    def update(self):
        self.average.update()

    def state_dict(self):
        return self.average.state_dict()


class Timm(Peer):
    steps = 0

    def make(self, model, decay, *, warmup, update_after_step):
        options = {"use_warmup": warmup, "update_after_step": update_after_step}
        return timm_model_ema().ModelEmaV3(model, decay=decay, **options)

    def update(self):
        # As in timm's train.py, which passes the number of the step where it matters.
        self.steps += 1
        self.average.update(self.model, step=self.steps)

    def values(self):
        return dict(self.average.module.state_dict())


class EmaPytorch(Peer):
    def make(self, model, decay, **options):
        return importlib.import_module("ema_pytorch").EMA(model, beta=decay, **options)

    def values(self):
        return dict(self.average.ema_model.state_dict())


class Diffusers(Peer):
    def make(self, model, decay, **options):
        library = importlib.import_module("diffusers.training_utils")
        return library.EMAModel(model.parameters(), decay=decay, **options)

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


class Lightning(Peer):
    """Lightning's callback, with what its Trainer calls."""

    def make(self, model, decay, *, update_every, update_after_step):
        pl = importlib.import_module("lightning.pytorch")
        self.trainer, self.module = types.SimpleNamespace(global_step=0), pl.LightningModule()
        self.module.net = model
        callback = pl.callbacks.EMAWeightAveraging(
            decay=decay,
            update_every_n_steps=update_every,
            update_starting_at_step=update_after_step,
        )
        callback.setup(self.trainer, self.module, "fit")
        return callback

    def update(self):
        self.trainer.global_step += 1
        self.average.on_train_batch_end(self.trainer, self.module, None, None, 0)

    def values(self):
        return dict(self.average._average_model.module.net.state_dict())

    def state_dict(self):
        checkpoint = {"state_dict": self.module.state_dict()}
        self.average.on_save_checkpoint(self.trainer, self.module, checkpoint)
        return {**checkpoint, "callback": self.average.state_dict()}
