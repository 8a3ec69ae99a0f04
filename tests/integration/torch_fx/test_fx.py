import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp

from tests.capabilities import TENSOR_LIKE_BUFFERS
from tests.cases import for_each
from tests.helpers import TORCH, Implementation, freeze, seed_everything
from tests.integration.networks import agree, gradients, make_batch, make_net, train


def nodes(graph: fx.Graph) -> list[tuple[str, str, str, str]]:
    """List a graph's nodes as text."""
    return [(node.op, str(node.target), node.name, str(node.args)) for node in graph.nodes]


@pytest.mark.parametrize("network", ["conv", "free", "nested"])
def test_symbolic_trace(network: str) -> None:
    """The traced graph has torch's nodes, and computes the outputs and gradients of the module."""
    if network == "free" and not TENSOR_LIKE_BUFFERS:
        pytest.skip("this torch refuses a proxy as a buffer")

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        traced = fx.symbolic_trace(net)
        output = traced(batch)
        output.sum().backward()
        return output, nodes(traced.graph), traced.code, gradients(traced)

    output, traced_nodes, _, _ = agree(scenario)

    assert output.shape == (4, 3)
    assert "call_module" in {op for op, *_ in traced_nodes}


def gated_net(impl: Implementation) -> torch.nn.Module:
    """Build a layer whose output is gated by a free parameter and a buffer."""
    seed_everything()
    nn = impl.nn

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.w = nn.Parameter(torch.randn(6))
            self.register_buffer("scale", torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * torch.tanh(self.w) * self.scale

    return Gated()


def layers(nn: Any) -> list[tuple[torch.nn.Module, Callable[[], tuple[Tensor, ...]]]]:
    """Layers of many kinds, each with inputs."""
    square = lambda: (torch.randn(2, 4),)
    image = lambda: (torch.randn(2, 4, 6, 6),)
    return [
        (nn.Linear(4, 3), square),
        (nn.Bilinear(4, 4, 2), lambda: (torch.randn(2, 4), torch.randn(2, 4))),
        (nn.Conv2d(4, 2, 3), image),
        (nn.ConvTranspose2d(4, 2, 3), image),
        (nn.BatchNorm2d(4), image),
        (nn.LayerNorm(4), square),
        (nn.GroupNorm(2, 4), image),
        (nn.Embedding(5, 3), lambda: (torch.tensor([1, 2]),)),
        (nn.LSTM(4, 3), lambda: (torch.randn(5, 2, 4),)),
        (nn.MultiheadAttention(4, 2), lambda: (torch.randn(5, 2, 4),) * 3),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), lambda: (torch.randn(5, 2, 4),)),
        (nn.Softmax(dim=1), square),
        (nn.PReLU(), square),
        (nn.MaxPool2d(2), image),
        (nn.Flatten(), image),
        (nn.Upsample(scale_factor=2), image),
        (nn.MSELoss(), lambda: (torch.randn(2, 4), torch.randn(2, 4))),
    ]


@for_each("index", range(17))
def test_layers_are_leaves(impl: Implementation, index: int) -> None:
    """A layer of ``nn`` is one ``call_module`` node."""
    layer, inputs = layers(impl.nn)[index]

    class Unary(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, a: Tensor) -> Any:
            return self.layer(a)

    class Binary(Unary):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return self.layer(a, b)

    class Ternary(Unary):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Any:
            return self.layer(a, b, c)

    arguments = inputs()
    traced = fx.symbolic_trace((Unary, Binary, Ternary)[len(arguments) - 1]())
    outputs = torch.utils._pytree.tree_leaves(traced(*arguments))

    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layer"]
    assert len(traced.graph.nodes) == len(arguments) + 2
    assert all(isinstance(output, Tensor) for output in outputs)
    assert type(layer) is getattr(impl.nn, type(layer).__name__)


def test_containers_and_subclasses_are_traced_into() -> None:
    """A Sequential, a user's own module and a user's subclass of a layer are not leaves."""

    def scenario(impl: Implementation) -> list[Any]:
        nn = impl.nn

        class Mine(nn.Linear):
            pass

        class Own(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + 1

        return nodes(fx.symbolic_trace(nn.Sequential(Mine(4, 4), Own(), nn.Linear(4, 2))).graph)

    traced = agree(scenario)

    calls = [target for op, target, *_ in traced if op == "call_module"]
    assert calls == ["2"]


def test_free_parameter_stays_an_attribute(impl: Implementation) -> None:
    """``tanh(self.w)`` reads ``w`` at each call, so that updates of the weight count."""
    net, batch = gated_net(impl), make_batch("free")
    traced = fx.symbolic_trace(net)
    attributes = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    before = traced(batch)
    with torch.no_grad():
        net.w.add_(1.0)
    after = traced(batch)
    traced.w = torch.nn.Parameter(torch.zeros(6))
    zeroed = traced(batch)

    assert attributes == ["w", "scale"]
    assert not any("_tensor_constant" in attribute for attribute in attributes)
    assert not torch.equal(before, after)
    assert torch.equal(zeroed, torch.zeros(4, 6))


def test_traced_module_follows_training() -> None:
    """A traced network trains like the original, BatchNorm statistics included."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        traced = fx.symbolic_trace(make_net(impl.nn, "conv"))
        losses = train(traced, make_batch("conv"))
        return losses, dict(traced.state_dict()), traced.eval()(make_batch("conv"))

    losses, state, _ = agree(scenario)

    assert state["features.1.num_batches_tracked"] == 3
    assert losses[2] < losses[0]


def test_custom_tracer() -> None:
    """A tracer that declares other leaves sees the paths and classes of modkit's modules."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        asked = []

        class BlockTracer(fx.Tracer):
            def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
                asked.append((module_qualified_name, type(m).__name__))
                return type(m).__name__ in {"Block", "Linear"}

        net = make_net(impl.nn, "nested")
        tracer = BlockTracer()
        graph = tracer.trace(net)
        stacks = [
            [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            for node in graph.nodes
        ]
        output = fx.GraphModule(net, graph)(make_batch("nested"))
        return asked, nodes(graph), stacks, output

    asked, _, _, _ = agree(scenario)

    assert [name for name, _ in asked] == ["blocks.0", "blocks.1", "heads.left", "heads.right"]
    assert {kind for _, kind in asked} == {"Block", "Linear"}


def test_transformed_graph() -> None:
    """Passes that rewrite a graph, propagate shapes and interpret it run as on torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        traced = fx.symbolic_trace(make_net(impl.nn, "conv").eval())
        for node in traced.graph.nodes:
            if node.op == "call_module" and isinstance(
                traced.get_submodule(node.target), impl.nn.GELU
            ):
                with traced.graph.inserting_after(node):
                    clipped = traced.graph.call_function(torch.relu, node.args)
                node.replace_all_uses_with(clipped)
                traced.graph.erase_node(node)
        traced.recompile()
        traced.delete_all_unused_submodules()
        ShapeProp(traced).propagate(make_batch("conv"))
        shapes = [
            list(node.meta["tensor_meta"].shape)
            for node in traced.graph.nodes
            if "tensor_meta" in node.meta
        ]
        interpreted = fx.Interpreter(traced).run(make_batch("conv"))
        return traced.code, shapes, interpreted, [name for name, _ in traced.named_modules()]

    code, shapes, _, names = agree(scenario)

    assert "torch.relu" in code
    assert shapes[-1] == [4, 3]
    assert "features.6" not in names


def fused(impl: Implementation) -> tuple[set[str], Tensor]:
    """Run torch's experimental fusion; tell which modules are called, and an output."""
    with warnings.catch_warnings():
        # The pass imports torch.utils.mkldnn, which still writes its methods in TorchScript.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is")
        from torch.fx.experimental import optimization
    net = make_net(impl.nn, "conv")
    net(make_batch("conv"))
    graph_module = optimization.fuse(net.eval())
    calls = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    return calls, graph_module(make_batch("conv"))


def test_conv_batch_norm_fusion(impl: Implementation) -> None:
    """Torch's fusion pass, which looks layers up by their exact type, removes BatchNorm."""
    calls, _ = fused(impl)

    assert "features.0" in calls
    assert "features.1" not in calls


def test_network_after_fusion_pass(impl: Implementation) -> None:
    """Whether the fusion pass finds something to fuse or not, the outputs stay."""
    _, output = fused(impl)

    net = make_net(torch.nn, "conv")
    net(make_batch("conv"))
    torch.testing.assert_close(output, net.eval()(make_batch("conv")))


def test_graph_module_copies_and_pickles(impl: Implementation) -> None:
    """A traced network deep-copies and keeps its own weights."""
    traced = fx.symbolic_trace(make_net(impl.nn, "conv").eval())
    clone = copy.deepcopy(traced)
    with torch.no_grad():
        clone.head.bias.add_(1.0)

    assert type(clone.head) is impl.nn.Linear
    torch.testing.assert_close(clone(make_batch("conv")), traced(make_batch("conv")) + 1)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    """``make_fx`` records the same operations of a functional call and of its gradient."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(net, parameters, (x,)).square().sum()

        parameters = {name: p.detach() for name, p in net.named_parameters()}
        traced = make_fx(torch.func.grad(loss), tracing_mode=mode)(parameters, batch)
        return nodes(traced.graph), traced(parameters, batch)

    _, grads = agree(scenario)

    net = make_net(torch.nn, "nested")
    net(make_batch("nested")).square().sum().backward()
    torch.testing.assert_close(dict(grads), gradients(net))


def test_make_fx_of_module() -> None:
    """``make_fx`` of a module itself records its parameters and buffers as attributes."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = gated_net(impl), make_batch("free")
        traced = make_fx(net)(batch)
        return nodes(traced.graph), traced(batch), list(traced.named_buffers())

    traced_nodes, output, _ = agree(scenario)

    assert "get_attr" in {op for op, *_ in traced_nodes}
    assert torch.equal(output, gated_net(TORCH)(make_batch("free")))


def test_tracing_leaves_the_module_alone(impl: Implementation) -> None:
    """After tracing, calls and attribute reads of the module are ordinary again."""
    net, batch = gated_net(impl), make_batch("free")
    fx.symbolic_trace(net)

    assert isinstance(net.w, torch.nn.Parameter)
    assert freeze(net(batch)) == freeze(gated_net(TORCH)(batch))
