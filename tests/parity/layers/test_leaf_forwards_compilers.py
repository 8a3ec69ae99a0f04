import re

import pytest
import torch
from torch import fx
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch.nn.utils import parametrizations, prune, weight_norm

from tests.helpers import MODKIT, TORCH, freeze, same
from tests.parity.layers.leaf_cases import LEAVES, PLAIN
from tests.parity.layers.samples import torch_names


# Torch 2.14 and later say that TorchScript is deprecated; these tests are about what it does.
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
]


@pytest.fixture
def fresh_dynamo():
    """Start from no compiled code, and leave none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=PLAIN)
def plain(request):
    """Each layer once."""
    return LEAVES[request.param]


def _text(value):
    return re.sub(r"___torch_mangle_\d+\.| # [^\s:]+:\d+:\d+", "", torch_names(str(value)))


def _compiled_graphs(network, inputs):
    """Return the graphs as dynamo hands them on, and the result."""
    backend = EagerAndRecordGraphs()
    result = torch.compile(network, backend=backend, fullgraph=True)(*inputs)
    return [_text(graph.graph) for graph in backend.graphs], result


def test_dynamo_captures_the_same_graph(plain):
    """The graph has torch's nodes and names, for a layer alone and for one in a network."""

    def scenario(impl):
        layer = plain.build(impl.nn)
        alone = _compiled_graphs(layer, plain.inputs())
        torch._dynamo.reset()

        class Net(impl.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = layer
                self.more = impl.nn.Sequential(impl.nn.ReLU(), impl.nn.Tanh())

            def forward(self, *inputs):
                return self.more(self.layer(*inputs))

        return alone, _compiled_graphs(Net().eval(), plain.inputs())

    same(scenario)


def test_dynamo_compiles_changed_weights(plain):
    """Weights that are replaced, or computed, after compiling are the ones that are used."""

    def scenario(impl):
        layer = plain.build(impl.nn).eval()
        counter = CompileCounter()
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        outputs = [compiled(*plain.inputs())]
        layer.weight = torch.nn.Parameter(layer.weight.detach() + 1)
        outputs.append(compiled(*plain.inputs()))
        prune.random_unstructured(layer, "weight", amount=1)
        prune.remove(layer, "weight")
        outputs.append(compiled(*plain.inputs()))
        layer.__dict__["weight"] = layer.weight.detach() * 2
        outputs.append(compiled(*plain.inputs()))
        return outputs, counter.op_count

    same(scenario)


def test_dynamo_leaves_layers_alone_where_the_caller_was_not_compiled():
    """A layer that uncompilable code calls is not compiled by itself."""

    def scenario(impl):
        class Net(impl.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = impl.nn.ModuleList(impl.nn.Linear(3, 3) for _ in range(3))

            @torch._dynamo.disable(recursive=False)
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        counter = CompileCounter()
        return torch.compile(Net(), backend=counter)(torch.ones(2, 3)), counter.frame_count

    same(scenario)


@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm], ids=["old", "new"])
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "Embedding"])
def test_dynamo_compiles_normed_weights(name, norm):
    """A weight that is no parameter any more compiles to torch's operations."""
    leaf = LEAVES[name]

    def scenario(impl):
        backend = EagerAndRecordGraphs()
        compiled = torch.compile(norm(leaf.build(impl.nn)), backend=backend, fullgraph=True)
        result = compiled(*leaf.inputs())
        return [str(node.target) for node in backend.graphs[0].graph.nodes][-3:], result

    same(scenario)


def test_inductor_trains(impl):
    """The default backend gives the eager gradients."""
    torch.manual_seed(0)
    network = impl.nn.Sequential(impl.nn.Linear(3, 4), impl.nn.LayerNorm(4), impl.nn.PReLU())
    x = torch.randn(5, 3)
    network(x).sum().backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    torch.compile(network, fullgraph=True)(x).sum().backward()

    torch.testing.assert_close([parameter.grad for parameter in network.parameters()], expected)


def _script(impl, build):
    scripted = torch.jit.script(build(impl.nn).eval())
    return _text(scripted.inlined_graph), scripted


@pytest.mark.parametrize("name", LEAVES)
def test_scripted_graph(name):
    """TorchScript reads torch's source, so the graph is the same."""
    leaf = LEAVES[name]

    def scenario(impl):
        graph, scripted = _script(impl, leaf.build)
        return graph, scripted(*leaf.inputs(), **leaf.call)

    same(scenario)


def test_scripted_subclasses(plain):
    """A subclass without a ``forward`` scripts like its base."""

    def scenario(impl):
        layer = plain.build(impl.nn)
        layer.__class__ = type("Own", (type(layer),), {})
        scripted = torch.jit.script(layer.eval())
        return _text(scripted.inlined_graph), scripted(*plain.inputs())

    same(scenario)


def test_scripted_network(impl):
    """Nested containers script, and compute what they do without."""
    nn = impl.nn
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.PReLU()))
    network = nn.Sequential(nn.Linear(3, 4), block, nn.BatchNorm1d(4))
    x = torch.randn(5, 3)
    expected = network.eval()(x)

    torch.testing.assert_close(torch.jit.script(network)(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.jit.trace(network, x)(x), expected, rtol=0, atol=0)


def _nodes(graph):
    return [
        (node.op, node.name, torch_names(node.target), str(node.args), str(node.kwargs))
        for node in graph.nodes
    ]


@pytest.mark.parametrize("name", LEAVES)
def test_fx_root(name):
    """Parameters of a traced layer become nodes that read them, as with torch."""
    leaf = LEAVES[name]

    def scenario(impl):
        layer = leaf.build(impl.nn).eval()
        traced = fx.symbolic_trace(layer, concrete_args=leaf.call or None)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1)
        return _nodes(traced.graph), traced(*leaf.inputs(), *leaf.call.values())

    outcome = same(scenario)

    assert outcome[0] == "raised" or "_tensor_constant" not in str(outcome)


def test_fx_leaf(plain):
    """In a network the layer is one node."""

    def scenario(impl):
        network = impl.nn.Sequential(plain.build(impl.nn).eval())
        return _nodes(fx.symbolic_trace(network).graph)

    outcome = same(scenario)

    assert outcome[0] == "raised" or "call_module" in str(outcome)


def test_export(plain):
    """An exported layer has torch's graph."""

    def scenario(impl):
        exported = torch.export.export(plain.build(impl.nn).eval(), plain.inputs())
        return _nodes(exported.graph), exported.module()(*plain.inputs())

    same(scenario)


def test_quantization_aware_layers_are_torchs():
    """Layers that torch derives from its own for quantization keep torch's ``forward``."""
    qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    results = []
    for impl in (TORCH, MODKIT):
        torch.manual_seed(0)
        made = torch.ao.nn.qat.Linear(3, 4, qconfig=qconfig)
        results.append(freeze(impl.nn.Sequential(made)(torch.ones(2, 3))))

    assert results[0] == results[1]
