import copy
import pickle

import pytest
import torch
from torch import fx

from tests.helpers import MODKIT, TORCH, freeze
from tests.parity.layers.samples import samples, torch_names


def _nodes(graph_module):
    return [
        (node.op, node.name, torch_names(node.target), str(node.args), str(node.kwargs))
        for node in graph_module.graph.nodes
    ]


def _same_graph(build, x):
    """Assert that both libraries' networks trace to the same nodes and compute the same."""
    seen = {}
    for impl in (TORCH, MODKIT):
        torch.manual_seed(0)
        network = build(impl.nn).eval()
        traced = fx.symbolic_trace(network)
        seen[impl] = _nodes(traced), freeze(traced(x))

    assert seen[MODKIT] == seen[TORCH]
    return [op for op, *_ in seen[TORCH][0]]


@pytest.mark.parametrize("name", samples())
def test_every_layer_is_a_leaf(impl, name):
    """Tracing does not look into a layer, nor into the layers that it is made of."""
    made = samples()[name].build(impl)
    containers = (torch.nn.Sequential,)
    seen = {
        child: fx.Tracer().is_leaf_module(child, "child")
        for child in made.modules()
        if not isinstance(child, containers)
    }

    assert all(seen.values())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copy_of_a_layer_is_a_leaf(impl, copied):
    """A copied layer is as much of a leaf as the original."""
    assert fx.Tracer().is_leaf_module(copied(impl.nn.Linear(2, 3)), "child")


def test_own_modules_are_no_leaves(impl):
    """Users' modules, and users' subclasses of layers, are traced through."""

    class Own(impl.nn.Module):
        pass

    class OwnLinear(impl.nn.Linear):
        pass

    assert not fx.Tracer().is_leaf_module(Own(), "child")
    assert not fx.Tracer().is_leaf_module(OwnLinear(2, 3), "child")


def test_materialized_lazy_layer_of_a_user_is_a_leaf(impl):
    """A user's lazy class whose instance becomes a plain layer is a leaf from then on."""

    class OwnLazy(impl.nn.LazyLinear):
        pass

    layer = OwnLazy(2)
    before = fx.Tracer().is_leaf_module(layer, "child")
    layer(torch.ones(1, 3))

    assert (before, fx.Tracer().is_leaf_module(layer, "child")) == (False, True)


def test_convolutional_network_traces_as_torch():
    """A sequential network becomes one call of a module for each layer."""

    def build(nn):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        )

    operations = _same_graph(build, torch.randn(2, 1, 5, 5))

    assert operations.count("call_module") == 6


def test_network_with_own_parameters_traces_as_torch():
    """Reads of parameters and buffers stay reads, so a later update is not lost."""

    def build(nn):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.randn(3))
                self.register_buffer("shift", torch.randn(3))
                self.body = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.LSTM(3, 3)})
                self.gates = nn.ParameterList([torch.randn(3)])

            def forward(self, x):
                y, _ = self.body["b"](torch.tanh(self.scale) * self.body["a"](x) + self.shift)
                return y * self.gates[0]

        return Net()

    operations = _same_graph(build, torch.randn(2, 3))

    assert operations.count("get_attr") == 3
    assert operations.count("call_module") == 2


def test_attention_network_traces_as_torch():
    """A transformer layer in a user's network is one node."""

    def build(nn):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encode = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
                self.head = nn.Linear(4, 2)

            def forward(self, x):
                return self.head(self.encode(x)[:, 0])

        return Net()

    operations = _same_graph(build, torch.randn(2, 3, 4))

    assert operations.count("call_module") == 2
