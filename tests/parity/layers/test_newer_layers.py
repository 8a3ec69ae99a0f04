import copy
import pickle
import warnings

import pytest
import torch
from torch import fx, nn
from typing_extensions import deprecated

import modkit.nn
from modkit.nn._layers import REBASED, TORCH_HOME
from modkit.nn.modules._newer import layer_class
from tests.helpers import freeze


@pytest.fixture
def release(monkeypatch):
    """Pretend that torch has released a layer class in a file below ``torch.nn.modules``."""
    known = set(REBASED)

    def add(layer, file):
        layer.__module__ = f"torch.nn.modules.{file}"
        layer.__qualname__ = layer.__name__
        home = getattr(torch.nn.modules, file, torch.nn)
        for namespace in {home, torch.nn, torch.nn.modules}:
            monkeypatch.setattr(namespace, layer.__name__, layer, raising=False)
        return layer

    yield add
    for layer in set(REBASED) - known:
        del TORCH_HOME[REBASED.pop(layer)]


def test_layer_of_a_newer_torch_is_rebased(release):
    """An unknown layer is found under all of its names, as one modkit class in its hierarchy."""

    class Doubled(nn.Linear):
        """Twice a linear layer."""

        def forward(self, x):
            return 2 * super().forward(x)

    release(Doubled, "linear")
    mine = modkit.nn.Doubled

    assert mine is modkit.nn.modules.Doubled is modkit.nn.modules.linear.Doubled
    assert mine is layer_class(Doubled)
    assert mine.__mro__[:4] == (mine, Doubled, modkit.nn.Linear, nn.Linear)
    assert mine.__module__ == "modkit.nn.modules.linear"
    assert mine.__doc__.endswith("Same as ``torch.nn.Doubled``.")


def test_instance_of_a_newer_layer_is_a_full_modkit_layer(release):
    """It computes as torch's, is a leaf for fx, and survives pickle and deepcopy."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    release(Doubled, "linear")
    layer, theirs = modkit.nn.Doubled(2, 3), Doubled(2, 3)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2)

    assert freeze(layer(x)) == freeze(theirs(x))
    assert fx.Tracer().is_leaf_module(layer, "layer")
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is modkit.nn.Doubled


def test_children_and_private_bases_of_a_newer_layer(release):
    """Children that its constructor builds are modkit's, and so are bases that nobody lists."""

    class _Block(nn.Module):
        def __init__(self, given):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.given = given

    class Block(_Block):
        pass

    release(_Block, "linear")
    release(Block, "linear")
    given = nn.Linear(2, 2)
    block = modkit.nn.Block(given)

    assert isinstance(block, modkit.nn.modules.linear._Block)
    assert [type(m) for m in block.body.modules()] == [
        modkit.nn.Sequential,
        modkit.nn.Linear,
        modkit.nn.ReLU,
    ]
    assert type(block.given) is nn.Linear


def test_newer_layer_in_a_file_that_modkit_has_not(release):
    """A layer from a file that modkit does not mirror lives in ``modkit.nn``."""

    class Novel(nn.Module):
        pass

    release(Novel, "novelties")

    assert modkit.nn.Novel.__module__ == "modkit.nn"
    assert pickle.loads(pickle.dumps(modkit.nn.Novel)) is modkit.nn.Novel


def test_newer_deprecated_layer_warns_as_torch(release):
    """Re-basing a deprecated layer is silent; building and subclassing it warn once."""

    @deprecated("`Old` is deprecated.", category=FutureWarning)
    class Old(nn.Module):
        pass

    release(Old, "linear")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = modkit.nn.Old
        silent = len(caught)
        mine()
        built = len(caught)
        type("Own", (mine,), {})

    assert (silent, built, len(caught)) == (0, 1, 2)


def test_newer_lazy_layer(release):
    """A lazy layer of a newer torch is lazy in modkit, too."""

    class LazyDoubled(nn.LazyLinear):
        pass

    release(LazyDoubled, "linear")
    layer = modkit.nn.LazyDoubled(2)
    layer(torch.ones(1, 3))

    assert type(layer) is modkit.nn.Linear
    assert issubclass(modkit.nn.LazyDoubled, modkit.nn.modules.lazy.LazyModuleMixin)


def test_classes_from_elsewhere_stay():
    """Module classes that torch.nn only passes on, such as quantized ones, are torch's own."""
    assert modkit.nn.quantized.Linear is torch.nn.quantized.Linear
    assert modkit.nn.quantizable.LSTM is torch.nn.quantizable.LSTM
    assert (
        modkit.nn.utils.parametrize.ParametrizationList is nn.utils.parametrize.ParametrizationList
    )
