"""The averages of several libraries behind one interface: made, updated, read, saved and loaded.

A library that is not installed raises ModuleNotFoundError when its average is made. What a library does not
offer raises `Missing`.
"""

import contextlib
import importlib
import importlib.util
import types
from pathlib import Path

import torch

import modkit
from modkit import schedules
from tests.integration.pages import Missing


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


def renamed(options, names):
    """Return options under a library's names, `{ours: theirs}`; one that has none is missing."""
    if unknown := options.keys() - names.keys():
        raise Missing(", ".join(unknown))
    return {names[name]: value for name, value in options.items()}


class Peer:
    """One average of a model; `values` gives its tensors by the model's names.

    Args:
        model: The averaged model.
        decay: The decay.
        **options: `update_every`, `update_after_step`, `warmup=True`, `rule` (a function of the number of
            averaged models that returns the decay), `average_buffers`, `copy_by_name` (names of buffers to
            copy while others are averaged), `decays` (several averages), `trainable_only`, `skip_nonfinite`,
            and `device`.
    """

    distribution = None

    def __init__(self, model, decay=0.9, **options):
        self.model = model
        self.average = self.make(model, decay, **options)

    def update(self, model=None):
        """Update from the averaged model, or from another one."""
        self.average.update(self.model if model is None else model)

    def values(self):
        return dict(self.average.module.state_dict())

    def state_dict(self):
        return self.average.state_dict()

    def load_state_dict(self, state):
        self.average.load_state_dict(state)

    def start_from(self, weights):
        """Start the average from a plain state dict of the model."""
        self.average.module.load_state_dict(weights)

    def called(self, *inputs):
        """Call the averaged model, kept beside the model in training."""
        return self.average.module(*inputs)

    def to(self, dtype):
        self.average.to(dtype=dtype)

    def swapped(self):
        """Return a context manager inside which the model holds the average."""
        raise Missing

    def replace(self):
        """Replace the weights in training by the average."""
        raise Missing

    def rebind(self):
        """Take in parameters that the model has now and had not at the start."""
        raise Missing

    def values_of(self, index):
        """Return the tensors of one of several averages."""
        raise Missing

    @classmethod
    def post_hoc(cls, model, folder):
        """Return `update()` and `reconstruct(sigma_rel)` of a post-hoc average with snapshots."""
        raise Missing


class Modkit(Peer):
    def make(self, model, decay, **options):
        chosen = dict(options)
        schedule = chosen.pop("decays", None) or chosen.pop("rule", None) or decay
        if chosen.pop("warmup", False):
            schedule = schedules.CountWarmup(decay)
        if chosen.pop("average_buffers", False):
            chosen["buffers"] = "average"
        if names := chosen.pop("copy_by_name", None):
            chosen["buffers"] = {**dict.fromkeys(names, "copy"), "*": "average"}
        if chosen.pop("skip_nonfinite", False):
            chosen["on_nonfinite"] = "skip"
        return modkit.EMA(model, schedule=schedule, **chosen)

    def update(self, model=None):
        self.average.update(*([] if model is None else [model]))

    def values(self):
        return self.values_of(0)

    def values_of(self, index):
        return dict(self.average.named_averages(index))

    def start_from(self, weights):
        self.average.load_state_dict(weights)

    def called(self, *inputs):
        return self.average(*inputs)

    def swapped(self):
        return self.average.applied()

    def replace(self):
        self.average.copy_to()

    def rebind(self):
        self.average.rebind()

    @classmethod
    def post_hoc(cls, model, folder):
        average = modkit.PostHocEMA(model, folder, snapshot_every=100)
        return average.update, lambda width: average.reconstruct(sigma_rel=width).averages


class Torch(Peer):
    distribution = "torch"

    def make(self, model, decay, **options):
        library = torch.optim.swa_utils
        if rule := options.pop("rule", None):
            options["avg_fn"] = lambda old, new, n: rule(int(n)) * old + (1 - rule(int(n))) * new
        else:
            options["multi_avg_fn"] = library.get_ema_multi_avg_fn(decay)
        known = {name: name for name in ("avg_fn", "multi_avg_fn", "device")}
        chosen = renamed(options, {**known, "average_buffers": "use_buffers"})
        return library.AveragedModel(model, **chosen)

    def update(self, model=None):
        self.average.update_parameters(self.model if model is None else model)


class Timm(Peer):
    distribution = "timm"

    def make(self, model, decay, *, average_buffers=True, **options):
        names = {"warmup": "use_warmup", "update_after_step": "update_after_step"}
        chosen = renamed(options, {**names, "device": "device"})
        # As in timm's train.py, which passes the number of the step where it matters.
        self.steps = 0 if chosen else None
        return timm_model_ema().ModelEmaV3(
            model, decay=decay, exclude_buffers=not average_buffers, **chosen
        )

    def update(self, model=None):
        if self.steps is not None:
            self.steps += 1
        self.average.update(self.model if model is None else model, step=self.steps)


class EmaPytorch(Peer):
    distribution = "ema-pytorch"

    def make(self, model, decay, *, warmup=True, average_buffers=True, **options):
        library = importlib.import_module("ema_pytorch")
        names = {
            "copy_by_name": "param_or_buffer_names_no_ema",
            **{name: name for name in ("update_every", "update_after_step")},
        }
        chosen = {"update_after_step": 0, "update_every": 1, **renamed(options, names)}
        if not average_buffers:
            chosen["param_or_buffer_names_no_ema"] = {name for name, _ in model.named_buffers()}
        return library.EMA(model, beta=decay, **chosen)

    def update(self, model=None):
        if model is not None:
            raise Missing
        self.average.update()

    def values(self):
        return dict(self.average.ema_model.state_dict())

    def start_from(self, weights):
        self.average.ema_model.load_state_dict(weights)

    def called(self, *inputs):
        return self.average(*inputs)

    def replace(self):
        self.average.update_model_with_ema()

    @classmethod
    def post_hoc(cls, model, folder):
        library = importlib.import_module("ema_pytorch")
        average = library.PostHocEMA(
            model,
            sigma_rels=(0.05, 0.1),
            update_every=1,
            checkpoint_every_num_steps=100,
            checkpoint_folder=str(folder),
            checkpoint_dtype=torch.float32,
        )

        def reconstruct(width):
            return average.synthesize_ema_model(sigma_rel=width).ema_model.state_dict()

        return average.update, reconstruct


class Diffusers(Peer):
    distribution = "diffusers"

    def make(self, model, decay, *, warmup=True, trainable_only=False, **options):
        library = importlib.import_module("diffusers.training_utils")
        self.trainable_only = trainable_only
        chosen = renamed(options, {"update_after_step": "update_after_step"})
        return library.EMAModel(self.chosen(model), decay=decay, **chosen)

    def chosen(self, model):
        every = model.parameters()
        return [p for p in every if p.requires_grad or not self.trainable_only]

    def update(self, model=None):
        self.average.step(self.chosen(self.model if model is None else model))

    def values(self):
        names = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad or not self.trainable_only
        ]
        return dict(zip(names, self.average.shadow_params, strict=True))

    def start_from(self, weights):
        named = [weights[name] for name, _ in self.model.named_parameters()]
        self.average.load_state_dict({"shadow_params": named})

    def called(self, *inputs):
        raise Missing

    def replace(self):
        self.average.copy_to(self.chosen(self.model))


class TorchEma(Diffusers):
    distribution = "torch-ema"

    def make(self, model, decay, *, warmup=True, trainable_only=False, **options):
        library = importlib.import_module("torch_ema")
        self.trainable_only = trainable_only
        renamed(options, {})
        return library.ExponentialMovingAverage(self.chosen(model), decay=decay)

    def update(self, model=None):
        self.average.update(self.chosen(self.model if model is None else model))

    def start_from(self, weights):
        raise Missing

    def swapped(self):
        return self.average.average_parameters(self.model.parameters())


class Lightning(Peer):
    """Lightning's callback, with what its Trainer calls."""

    distribution = "lightning"

    def make(self, model, decay, **options):
        pl = importlib.import_module("lightning.pytorch")
        names = {"average_buffers": "use_buffers", "device": "device"}
        names |= {"update_every": "update_every_n_steps"}
        names |= {"update_after_step": "update_starting_at_step"}
        self.trainer, self.module = types.SimpleNamespace(global_step=0), pl.LightningModule()
        self.module.net = model
        callback = pl.callbacks.EMAWeightAveraging(decay=decay, **renamed(options, names))
        callback.setup(self.trainer, self.module, "fit")
        return callback

    def update(self, model=None):
        if model is not None:
            raise Missing
        self.trainer.global_step += 1
        self.average.on_train_batch_end(self.trainer, self.module, None, None, 0)

    def values(self):
        return dict(self.average._average_model.module.net.state_dict())

    def state_dict(self):
        checkpoint = {"state_dict": self.module.state_dict()}
        self.average.on_save_checkpoint(self.trainer, self.module, checkpoint)
        return {**checkpoint, "callback": self.average.state_dict()}

    def load_state_dict(self, state):
        self.average.on_load_checkpoint(self.trainer, self.module, state)
        self.average.load_state_dict(state["callback"])
        self.trainer.global_step = state["callback"]["latest_update_step"]

    def start_from(self, weights):
        raise Missing

    def called(self, *inputs):
        raise Missing

    def to(self, dtype):
        raise Missing

    @contextlib.contextmanager
    def swapped(self):
        # The callback has no hook for an error in a validation.
        self.average.on_validation_epoch_start(self.trainer, self.module)
        yield
        self.average.on_validation_epoch_end(self.trainer, self.module)


PEERS = {
    "modkit": Modkit,
    "torch": Torch,
    "timm": Timm,
    "ema-pytorch": EmaPytorch,
    "diffusers": Diffusers,
    "torch_ema": TorchEma,
    "Lightning": Lightning,
}
