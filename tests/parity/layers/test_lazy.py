import copy
import pickle

import pytest
import torch
from torch.nn.parameter import UninitializedParameter, is_lazy

import modkit.nn
from tests.helpers import MODKIT, freeze
from tests.parity.layers.samples import both, samples, seed


LAZY = [name for name in samples() if name.startswith("Lazy")]


@pytest.mark.parametrize("name", LAZY)
def test_becomes_the_plain_layer_of_its_library(impl, name):
    """The first call materializes the parameters and turns the layer into the plain class."""
    sample = samples()[name]
    layer = sample.build(impl)
    lazy_before = any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers()))
    seed()
    layer(*sample.inputs, **sample.input_kwargs)

    assert lazy_before
    assert type(layer) is getattr(impl.nn, name.removeprefix("Lazy"))
    assert not any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers()))
    assert not layer._forward_pre_hooks
    assert not layer._load_state_dict_pre_hooks


@pytest.mark.parametrize("name", LAZY)
def test_class_names_the_layer_it_becomes(name):
    """``cls_to_become`` is the modkit class of what torch's layer becomes."""
    theirs, mine = getattr(torch.nn, name), getattr(modkit.nn, name)

    assert mine.cls_to_become is getattr(modkit.nn, theirs.cls_to_become.__name__)
    assert issubclass(mine, mine.cls_to_become) == issubclass(theirs, theirs.cls_to_become)
    assert issubclass(mine, modkit.nn.modules.lazy.LazyModuleMixin)


@pytest.mark.parametrize("name", LAZY)
def test_is_initialized_as_in_torch(name):
    """Materialized weights, output and repr are torch's, from the same random state."""
    sample = samples()[name]

    def scenario(impl):
        layer = sample.build(impl)
        before = repr(layer)
        seed()
        return before, layer(*sample.inputs, **sample.input_kwargs), repr(layer), layer

    expected, actual = both(scenario)

    assert expected.startswith("('returned'")
    assert actual == expected


def _net(impl):
    return impl.nn.Sequential(
        impl.nn.LazyLinear(4), impl.nn.LazyBatchNorm1d(), impl.nn.LazyLinear(2)
    )


def _initialized(impl):
    net = _net(impl)
    net(torch.randn(3, 5))
    return net


MISUSES = {
    "count_parameters": lambda net: sum(p.numel() for p in net.parameters()),
    "shape": lambda net: net[0].weight.shape,
    "optimizer": lambda net: torch.optim.SGD(net.parameters(), 0.1),
    "share_memory": lambda net: net.share_memory(),
    "replicate": lambda net: net[0]._replicate_for_data_parallel(),
    "wrong_input": lambda net: net("text"),
    "no_input": lambda net: net(),
    "backward_twice": lambda net: (
        net(torch.ones(3, 5)).sum().backward(),
        net[0].weight.grad.shape,
    ),
    "double": lambda net: net.double()(torch.ones(3, 5).double()),
    "half_then_meta": lambda net: [p.dtype for p in net.half().parameters()],
    "state": lambda net: [(k, type(v).__name__) for k, v in net.state_dict().items()],
    "named_parameters": lambda net: [(n, type(p).__name__) for n, p in net.named_parameters()],
    "requires_grad": lambda net: [p.requires_grad for p in net.requires_grad_(False).parameters()],
    "deepcopy": copy.deepcopy,
    "meta": lambda net: net.to("meta")(torch.ones(3, 5, device="meta")).shape,
    "keyword": lambda net: net[0](input=torch.ones(3, 5)),
    "eval": lambda net: net.eval()(torch.ones(3, 5)),
    "second_size": lambda net: (net(torch.ones(3, 5)), net(torch.ones(3, 6))),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("misuse", MISUSES)
def test_uninitialized_network(misuse):
    """Before the first call, and around it, a lazy network does and refuses what torch's does."""
    expected, actual = both(lambda impl: MISUSES[misuse](_net(impl)))

    assert actual == expected


def test_checkpoints_load_into_lazy_networks(impl):
    """A lazy network takes the shapes of a checkpoint of either library, and stays lazy by class."""
    for source in (impl, MODKIT):
        saved = _initialized(source)
        loaded = _net(impl)
        result = loaded.load_state_dict(saved.state_dict())
        classes = [type(layer).__name__ for layer in loaded]
        x = torch.randn(3, 5)

        assert str(result) == "<All keys matched successfully>"
        assert classes == ["LazyLinear", "LazyBatchNorm1d", "LazyLinear"]
        assert freeze(loaded.eval()(x)) == freeze(saved.eval()(x))
        assert [type(layer) for layer in loaded] == [type(layer) for layer in _initialized(impl)]


def test_uninitialized_checkpoint_loads_into_initialized_network():
    """Loading uninitialized parameters into initialized ones fails with torch's text."""
    expected, actual = both(
        lambda impl: _initialized(impl).load_state_dict(_net(impl).state_dict())
    )

    assert actual == expected


def test_pickled_lazy_network_works_on_its_own(impl):
    """An unpickled lazy network is materialized alone; the original stays lazy."""
    net = _net(impl)
    copy_of_net = pickle.loads(pickle.dumps(net))
    copy_of_net(torch.ones(3, 5))

    assert type(copy_of_net[0]) is impl.nn.Linear
    assert type(net[0]) is impl.nn.LazyLinear
    assert isinstance(net[0].weight, UninitializedParameter)


def test_own_lazy_layer(impl):
    """A user's lazy layer on the mixin of either library becomes the class that it names."""

    class Scale(impl.nn.Module):
        def forward(self, x):
            return x * self.weight

    class LazyScale(impl.submodule("nn.modules.lazy").LazyModuleMixin, Scale):
        cls_to_become = Scale

        def __init__(self):
            super().__init__()
            self.weight = UninitializedParameter()

        def initialize_parameters(self, x):
            with torch.no_grad():
                self.weight.materialize(x.shape[-1:])
                self.weight.fill_(2)

    layer = LazyScale()
    output = layer(torch.ones(1, 3))

    assert output.tolist() == [[2.0] * 3]
    assert type(layer) is Scale


def test_own_lazy_layer_without_initialization(impl):
    """A lazy layer that does not say how it is initialized fails at the first call."""

    class Forgotten(impl.submodule("nn.modules.lazy").LazyModuleMixin, impl.nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.weight = UninitializedParameter()

    with pytest.raises(
        NotImplementedError, match="initialize_parameters is not implemented for Forgotten"
    ):
        Forgotten()(torch.ones(1, 1))
