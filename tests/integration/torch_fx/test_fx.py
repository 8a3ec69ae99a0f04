from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.capabilities import TENSOR_LIKE_BUFFERS
from tests.helpers import TORCH, Implementation, freeze, seed_everything
from tests.integration.networks import agree, gradients, make_batch, make_net


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


def test_tracing_leaves_the_module_alone(impl: Implementation) -> None:
    """After tracing, calls and attribute reads of the module are ordinary again."""
    net, batch = gated_net(impl), make_batch("free")
    fx.symbolic_trace(net)

    assert isinstance(net.w, torch.nn.Parameter)
    assert freeze(net(batch)) == freeze(gated_net(TORCH)(batch))
