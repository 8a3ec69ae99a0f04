"""The loading of state dicts in several libraries behind one interface: declared, loaded, and led back.

A library that is not installed raises ModuleNotFoundError when a model is made. What a library does not offer raises
`Missing`.
"""

import contextlib
import importlib
import itertools
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import modkit
from modkit import migrations as mig
from tests.integration.pages import Missing


COUNT = itertools.count()


@contextlib.contextmanager
def heard(*loggers):
    """Collect the texts of all warnings, those of the loggers of libraries included."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    for name in loggers:
        logging.getLogger(name).addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
    finally:
        texts += [str(one.message) for one in caught]
        for name in loggers:
            logging.getLogger(name).removeHandler(handler)


@contextlib.contextmanager
def saved(state):
    """Write a temporary file of `torch.save`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint.pt")
        torch.save(state, file)
        yield file


class Peer:
    """A library whose models load state dicts.

    Steps are `("rename", old, new)` for layers, `("join", olds, new)` for layers, and `("transpose", name)` for a tensor.
    """

    distribution = None
    loggers = ()

    def declare(self, cls, steps):
        """Declare on a class, once, how its old state dicts become new ones."""
        raise Missing

    def block(self, layers, steps=()):
        """Return a class of plain modules with these layers, which declares the steps."""
        return self._class(nn.Module, layers, steps)

    def network(self, layers, steps=()):
        """Return a model with these layers, whose class declares the steps."""
        return self._new(self._class(nn.Module, layers, steps))

    def _class(self, base, layers, steps):
        def fill(module):
            for name, make in layers.items():
                module.add_module(name, make())

        cls = self._derived(base, fill)
        cls.__name__ = f"{base.__name__}{next(COUNT)}"
        if steps:
            self.declare(cls, steps)
        return cls

    def _derived(self, base, fill):
        class Derived(base):
            def __init__(self):
                super().__init__()
                fill(self)

        return Derived

    def _new(self, cls):
        return cls()

    def load(self, model, state, *, strict=True, fitting=False):
        """Load a state dict, or only what has the right shape; return the model, and all warnings."""
        with heard(*self.loggers) as texts:
            model = self._loaded(model, state, strict=strict, fitting=fitting)
        return model, texts

    def _loaded(self, model, state, *, strict, fitting):
        model.load_state_dict(state, strict=strict and not fitting)
        return model

    def older(self, model):
        """Return the state dict of the version before."""
        raise Missing

    def older_optimizer(self, model, optimizer_state):
        """Return the state of an optimizer as of the version before."""
        raise Missing


class Modkit(Peer):
    def declare(self, cls, steps):
        kinds = {
            "rename": lambda old, new: mig.rename(f"{old}.**", f"{new}.**"),
            "join": lambda olds, new: mig.merge([f"{old}.*" for old in olds], f"{new}.*"),
            "transpose": lambda name: mig.convert(name, torch.t, torch.t),
        }
        mig.declare({2: [kinds[kind](*names) for kind, *names in steps]})(cls)

    def _loaded(self, model, state, *, strict, fitting):
        if fitting:
            warnings.warn(repr(modkit.load_matching(model, state)), stacklevel=2)
        else:
            modkit.load_state_dict(model, state, strict=strict)
        return model

    def older(self, model):
        return mig.migrate(model, model.state_dict(), to={type(model): 1})

    def older_optimizer(self, model, optimizer_state):
        return mig.migrate(model, optimizer_state, to={type(model): 1})


class Torch(Peer):
    distribution = "torch"


class Timm(Peer):
    distribution = "timm"
    loggers = ("timm",)

    def _loaded(self, model, state, *, strict, fitting):
        strict = strict and not fitting
        with saved(state) as file:
            importlib.import_module("timm.models").load_checkpoint(model, file, strict=strict)
        return model


class Diffusers(Peer):
    distribution = "diffusers"
    loggers = ("diffusers",)

    def network(self, layers, steps=()):
        library = importlib.import_module("diffusers")

        class Model(library.ModelMixin, library.ConfigMixin):
            config_name = "config.json"

        return self._new(self._class(Model, layers, steps))

    def _loaded(self, model, state, *, strict, fitting):
        files = importlib.import_module("safetensors.torch")
        options = {"ignore_mismatched_sizes": True, "low_cpu_mem_usage": False} if fitting else {}
        with tempfile.TemporaryDirectory() as folder:
            model.save_config(folder)
            files.save_file(dict(state), Path(folder, "diffusion_pytorch_model.safetensors"))
            return type(model).from_pretrained(folder, **options)


class Transformers(Peer):
    distribution = "transformers"
    loggers = ("transformers",)

    def network(self, layers, steps=()):
        base = importlib.import_module("transformers").PreTrainedModel
        return self._new(self._class(base, layers, steps))

    def _derived(self, base, fill):
        if base is nn.Module:
            return super()._derived(base, fill)

        class Derived(base):
            config_class = importlib.import_module("transformers").PreTrainedConfig

            def __init__(self, config):
                super().__init__(config)
                fill(self)
                self.post_init()

            def _init_weights(self, module):
                pass

        return Derived

    def _new(self, cls):
        return cls(cls.config_class())

    def declare(self, cls, steps):
        loading = importlib.import_module("transformers.core_model_loading")
        conversions = importlib.import_module("transformers.conversion_mapping")
        transforms = []
        for kind, *names in steps:
            if kind == "rename":
                transforms.append(loading.WeightRenaming(*(f"{name}." for name in names)))
            elif kind == "join":
                olds, new = names
                transforms += [
                    loading.WeightConverter(
                        [f"{old}.{end}" for old in olds],
                        f"{new}.{end}",
                        operations=[loading.Concatenate(dim=0)],
                    )
                    for end in ("weight", "bias")
                ]
            else:
                operations = [loading.Transpose(0, 1)]
                transforms.append(loading.WeightConverter(names, names, operations=operations))
        conversions.register_checkpoint_conversion_mapping(cls.__name__, transforms)

    def _loaded(self, model, state, *, strict, fitting):
        options = {"config": model.config, "state_dict": dict(state)}
        return type(model).from_pretrained(None, **options, ignore_mismatched_sizes=fitting)

    def older(self, model):
        files = importlib.import_module("safetensors.torch")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return files.load_file(Path(folder, "model.safetensors"))


class Lightning(Peer):
    distribution = "lightning"

    def network(self, layers, steps=()):
        library = importlib.import_module("lightning.pytorch")
        return self._new(self._class(library.LightningModule, layers, steps))

    def _loaded(self, model, state, *, strict, fitting):
        strict = strict and not fitting
        version = importlib.import_module("lightning.pytorch").__version__
        with saved({"state_dict": state, "pytorch-lightning_version": version}) as file:
            return type(model).load_from_checkpoint(file, strict=strict, map_location="cpu")


PEERS = {
    "modkit": Modkit,
    "torch": Torch,
    "timm": Timm,
    "diffusers": Diffusers,
    "transformers": Transformers,
    "Lightning": Lightning,
}
