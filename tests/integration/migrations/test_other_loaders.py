"""Old files of declared classes in the loaders of libraries: some call `load_state_dict`, the others need `migrate`."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import modkit
from modkit import migrations as mig
from tests.unit.migrations.networks import equal


def library(name):
    """Import a module of a library, or skip."""
    return pytest.importorskip(name, reason=f"needs {name}: nox -s ecosystem installs it")


class OldLayer(nn.Sequential):
    """The layer as it was in version 1."""

    def __init__(self):
        super().__init__(OrderedDict(fc=nn.Linear(2, 3)))


@mig.declare({2: [mig.rename("fc.**", "out.**")]})
class Layer(nn.Sequential):
    """The layer in version 2."""

    def __init__(self):
        super().__init__(OrderedDict(out=nn.Linear(2, 3)))


def network(layer, base=nn.Module):
    """Return a model of a library's class that has this layer."""

    class Network(base):
        def __init__(self):
            super().__init__()
            self.layer = layer()

    return Network()


def holds(model, old):
    """Return True if a model has the values of an old one."""
    return equal(model.state_dict(), mig.migrate(model, old.state_dict()))


def test_timm(tmp_path):
    """`load_checkpoint` of timm migrates, with and without versions."""
    models = library("timm.models")
    old = network(OldLayer)

    for number, state in enumerate((old.state_dict(), dict(old.state_dict()))):
        model, file = network(Layer), tmp_path / f"{number}.pt"
        torch.save(state, file)
        models.load_checkpoint(model, file)

        assert holds(model, old)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    """Checkpoints of Lightning keep the versions of modules, and `load_from_checkpoint` migrates."""
    pl = library("lightning.pytorch")
    old = network(OldLayer, pl.LightningModule)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", **options)
    trainer.strategy.connect(old)
    trainer.save_checkpoint(tmp_path / "old.ckpt")

    cls = type(network(Layer, pl.LightningModule))
    model = cls.load_from_checkpoint(tmp_path / "old.ckpt", map_location="cpu")

    assert holds(model, old)


def test_peft():
    """A declared layer migrates inside PEFT's, whose adapters are below the renamed layer."""
    peft = library("peft")
    old, model = (
        peft.get_peft_model(network(layer), peft.LoraConfig(r=2, target_modules=[name]))
        for layer, name in ((OldLayer, "fc"), (Layer, "out"))
    )
    for parameter in old.parameters():
        nn.init.normal_(parameter)

    model.load_state_dict(copy.deepcopy(old.state_dict()))

    assert holds(model, old)
    inputs = torch.ones(1, 2)
    assert torch.equal(model.base_model.model.layer(inputs), old.base_model.model.layer(inputs))


def test_transformers():
    """`from_pretrained` assigns tensors without `load_state_dict`: it needs a migrated state dict."""
    transformers = library("transformers")
    old = network(OldLayer)

    class Network(transformers.PreTrainedModel):
        config_class = transformers.PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.layer = Layer()
            self.post_init()

        def _init_weights(self, module):
            pass

    def loaded(state):
        options = {"config": transformers.PreTrainedConfig(), "output_loading_info": True}
        return Network.from_pretrained(None, state_dict=dict(state), **options)

    _, found = loaded(old.state_dict())
    model, rest = loaded(mig.migrate(network(Layer), old.state_dict()))

    assert found["missing_keys"] == {"layer.out.weight", "layer.out.bias"}
    assert not rest["missing_keys"]
    assert holds(model, old)


def test_accelerate(tmp_path):
    """`load_checkpoint_in_model` needs a migrated file, too."""
    accelerate = library("accelerate")
    old, model = network(OldLayer), network(Layer)
    torch.save(old.state_dict(), tmp_path / "old.pt")
    mig.migrate_file(model, tmp_path / "old.pt", tmp_path / "new.safetensors")

    accelerate.load_checkpoint_in_model(model, str(tmp_path / "new.safetensors"))

    assert holds(model, old)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "load", [torch.nn.Module.load_state_dict, modkit.load_state_dict], ids=["torch", "modkit"]
)
def test_quantized_layers(load):
    """A quantized layer finds its version under its new name in what `migrate` returns."""
    old, model = (
        torch.ao.quantization.quantize_dynamic(network(layer), {nn.Linear})
        for layer in (OldLayer, Layer)
    )
    inputs = torch.rand(5, 2)
    assert not torch.equal(model.layer(inputs), old.layer(inputs))

    load(model, mig.migrate(model, old.state_dict()))

    assert torch.equal(model.layer(inputs), old.layer(inputs))
