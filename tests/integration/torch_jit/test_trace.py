import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torchscript import layout, neutral, reloaded, scripted_tests


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


def test_archive() -> None:
    """A traced network goes through an archive, with its layout and its buffers."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "conv").eval(), make_batch("conv")
        loaded = reloaded(traced(net, (batch,))[0])

        assert torch.equal(loaded(batch), net(batch))

        return loaded(batch), dict(loaded.state_dict()), layout(loaded)

    agree(scenario)


def test_several_methods() -> None:
    """``trace_module`` records several methods of one module."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn = impl.nn

        class Coder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.down = nn.Linear(6, 2)
                self.up = nn.Linear(2, 6)

            def encode(self, x: Tensor) -> Tensor:
                return self.down(x).tanh()

            def decode(self, z: Tensor) -> Tensor:
                return self.up(z)

            def forward(self, x: Tensor) -> Tensor:
                return self.decode(self.encode(x))

        net, batch = Coder(), make_batch("free")
        inputs = {"forward": batch, "encode": batch, "decode": torch.randn(4, 2)}
        program = torch.jit.trace_module(net, inputs)
        code = program.encode(batch)

        assert torch.equal(program.decode(code), net(batch))

        return code, program(batch), neutral(program.inlined_graph)

    agree(scenario)


def test_trace_inside_a_script() -> None:
    """A scripted network calls a traced one, and a traced one calls a scripted one."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn, batch = impl.nn, make_batch("free")
        inner, _ = traced(nn.Linear(6, 6), (batch,))
        script = torch.jit.script(nn.Sequential(inner, nn.ReLU()))
        outer, _ = traced(nn.Sequential(script, nn.Linear(6, 3)), (batch,))
        return outer(batch), neutral(outer.inlined_graph), reloaded(outer)(batch)

    output, _, again = agree(scenario)

    assert torch.equal(output, again)


def test_failing_check_is_reported(impl: Implementation) -> None:
    """A network that computes something else each time fails the tracer's check."""

    class Unstable(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    with pytest.raises(torch.jit.TracingCheckError, match="Graphs differed across invocations"):
        traced(Unstable(), (make_batch("free"),))


def test_tracing_leaves_the_module_alone(impl: Implementation) -> None:
    """After tracing, a call is an ordinary call."""
    net, batch = make_net(impl.nn, "nested"), make_batch("nested")
    keys = list(net.__dict__)
    traced(net, (batch,))

    assert list(net.__dict__) == keys
    assert torch.equal(net(batch), make_net(torch.nn, "nested")(batch))
