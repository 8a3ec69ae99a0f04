import warnings
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torchscript import neutral, scripted_tests


pytestmark = scripted_tests


def traced(net: torch.nn.Module, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """Trace a network with torch's own check of the result; tell what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.jit.trace(net, *args, **options)
    messages = sorted({str(w.message).split(". ")[0] for w in caught})
    return result, [message for message in messages if not message.startswith("`torch.jit")]


@for_each("network", NETWORKS)
def test_trace(network: str) -> None:
    """Each network traces to torch's graph with torch's scopes, and passes the tracer's check."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        program, messages = traced(net, (batch,))
        output = program(batch)
        output.square().sum().backward()
        graphs = neutral(program.graph), neutral(program.inlined_graph)
        return output, gradients(program), dict(program.state_dict()), graphs, messages

    output, grads, _, _, _ = agree(scenario)

    assert output.shape == (4, 3)
    assert all(grad is not None for grad in grads.values())


@pytest.mark.parametrize(
    ("network", "scopes"),
    [
        ("conv", ["__module.features/__module.features.1", "__module.head"]),
        ("free", ["__module.inner", "__module.out"]),
        ("nested", ["__module.blocks.0/__module.blocks.0.norm", "__module.heads.left"]),
    ],
)
def test_scopes(impl: Implementation, network: str, scopes: list[str]) -> None:
    """The graph says which module each operation came from."""
    program, _ = traced(make_net(impl.nn, network).eval(), (make_batch(network),))

    for scope in scopes:
        assert f"scope: {scope} #" in str(program.inlined_graph)


def test_hooks_are_traced() -> None:
    """Hooks run while tracing, inside the scope of their module, and stay in the graph."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        calls = []
        net.blocks[0].register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
        net.heads["left"].register_forward_hook(lambda _m, _args, output: output.sigmoid())
        net.register_forward_hook(
            lambda _m, _args, _kwargs, _output: calls.append(1), with_kwargs=True
        )
        program, _ = traced(net, (batch,))
        during = len(calls)
        result = program(batch)

        assert len(calls) == during
        torch.testing.assert_close(result, net(batch), rtol=0, atol=0)

        return result, neutral(program.inlined_graph), during

    _, graph, _ = agree(scenario)

    assert "aten::sigmoid" in graph
