from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from tests.helpers import Implementation, freeze
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torch_compile.dynamo import Recorder, compiled_tests


pytestmark = compiled_tests


@pytest.mark.parametrize("network", NETWORKS)
def test_training_step(network: str) -> None:
    """Each network compiles to one graph, whose outputs and gradients are those of torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        counter = CompileCounter()
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        outputs = []
        for _ in range(3):
            output = compiled(batch)
            output.square().sum().backward()
            outputs.append(output.detach())
        frames = counter.frame_count, counter.op_count
        return outputs, gradients(net), dict(net.state_dict()), frames

    outputs, grads, _, (frames, _) = agree(scenario)

    eager = make_net(torch.nn, network)
    assert freeze(eager(make_batch(network)).detach()) == freeze(outputs[0])
    assert all(grad is not None for grad in grads.values())
    assert frames == 1


@pytest.mark.parametrize("network", NETWORKS)
def test_graph_is_the_same(network: str) -> None:
    """The captured graph has torch's operations, and inputs named after the same members."""

    def scenario(impl: Implementation) -> list[Any]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        backend = CompileCounterWithBackend("eager")
        torch.compile(net, backend=backend, fullgraph=True)(batch)
        (graph,) = backend.graphs
        return [(node.op, str(node.target), node.name) for node in graph.graph.nodes]

    nodes = agree(scenario)

    assert any(op == "placeholder" and "parameters" in target for op, target, _ in nodes)


@pytest.mark.parametrize("network", NETWORKS)
def test_no_graph_breaks(network: str) -> None:
    """``torch._dynamo.explain`` finds one graph and no break."""

    def scenario(impl: Implementation) -> tuple[int, int, int]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        explanation = torch._dynamo.explain(net)(batch)
        return (
            explanation.graph_count,
            explanation.graph_break_count,
            explanation.op_count,
        )

    graphs, breaks, _ = agree(scenario)

    assert (graphs, breaks) == (1, 0)


def test_buffer_is_reassigned_in_forward() -> None:
    """Buffers that ``forward`` adds to or assigns keep their new values after compiled calls."""

    def scenario(impl: Implementation) -> tuple[Tensor, Tensor, int]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        counter = CompileCounter()
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        for _ in range(4):
            compiled(batch)

        assert net.running is net._buffers["running"]
        assert net.running is dict(net.named_buffers())["running"]

        return net.counter, net.running, counter.frame_count

    counter, running, frames = agree(scenario)

    assert counter == 4
    expected = torch.zeros(6)
    for _ in range(4):
        expected = 0.9 * expected + 0.1 * make_batch("free").mean(0)
    assert torch.equal(running, expected)
    assert frames == 1


def test_compile_method() -> None:
    """``m.compile()`` compiles in place: the call goes through it, the state dict stays."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "conv"), make_batch("conv")
        keys = list(net.state_dict())
        counter = CompileCounter()
        net.compile(backend=counter, fullgraph=True)
        net.register_forward_hook(lambda _module, _args, output: output * 2)
        outputs = [net(batch).detach(), net.eval()(batch).detach()]

        assert list(net.state_dict()) == keys

        return outputs, counter.frame_count, counter.op_count

    outputs, _, _ = agree(scenario)

    assert torch.equal(outputs[0], 2 * make_net(torch.nn, "conv")(make_batch("conv")))


def test_compile_method_of_children() -> None:
    """Children that compiled themselves are used by their eager parent."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        counter = CompileCounter()
        for block in net.blocks:
            block.compile(backend=counter, fullgraph=True)
        output = net(batch)
        output.sum().backward()
        return output, gradients(net), counter.frame_count

    output, _, frames = agree(scenario)

    assert frames >= 1
    assert torch.equal(output, make_net(torch.nn, "nested")(make_batch("nested")))


def test_keyword_arguments() -> None:
    """Arguments may be passed by name, and defaults apply, without further graphs."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], int, int]:
        class Scaled(impl.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = impl.nn.Linear(6, 2)

            def forward(self, x: Tensor, *, by: Tensor | None = None) -> Tensor:
                y = self.linear(input=x)
                return y if by is None else y * by

        recorder = Recorder(Scaled())
        batch = make_batch("free")
        recorder.call(batch)
        recorder.call(batch, by=torch.tensor(3.0))
        recorder.call(x=batch, by=torch.tensor(4.0))
        return recorder.report()

    (plain, tripled, _), _, _ = agree(scenario)

    assert torch.equal(plain * 3, tripled)


def creators(nn: ModuleType) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that build a module, use it and drop it."""

    class Scale(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    class Holder(nn.Module):
        def __init__(self, child: torch.nn.Module, tensor: Tensor) -> None:
            super().__init__()
            self.child = child
            self.register_buffer("shift", tensor)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x) + self.shift

    outer = nn.Linear(6, 6)

    def attribute(x: Tensor) -> Tensor:
        scale = Scale(2.0)
        scale.by = 3.0
        return scale(x)

    def members(x: Tensor) -> Tensor:
        return Holder(outer, x + 1)(x)

    def assigned_child(x: Tensor) -> Tensor:
        scale = Scale(2.0)
        scale.child = Scale(3.0)
        return scale.child(scale(x))

    def mode(x: Tensor) -> Tensor:
        scale = Scale(2.0)
        scale.train(mode=False)
        return scale(x) + scale.training

    return {
        "attribute": attribute,
        "members": members,
        "assigned_child": assigned_child,
        "mode": mode,
        "relu": lambda x: nn.ReLU()(x) + 1,
        "softmax": lambda x: nn.Softmax(dim=1)(x) + 1,
        "sequential": lambda x: nn.Sequential(Scale(2.0))(x) + 1,
    }


@pytest.mark.parametrize("creator", creators(torch.nn))
def test_module_is_created_inside(creator: str) -> None:
    """A module that is built, changed and called inside the compiled function works."""

    def scenario(impl: Implementation) -> tuple[Tensor, int, int]:
        function, batch = creators(impl.nn)[creator], make_batch("free")
        counter = CompileCounter()
        result = torch.compile(function, backend=counter, fullgraph=True)(batch)

        assert torch.equal(result, function(batch))

        return result, counter.frame_count, counter.op_count

    agree(scenario)


WALKS: Final[dict[str, Callable[[torch.nn.Module], Tensor]]] = {
    "parameters": lambda net: sum(p.sum() for p in net.parameters()),
    "named_parameters": lambda net: sum(
        p.sum() * len(name) for name, p in net.named_parameters(prefix="x", recurse=True)
    ),
    "buffers": lambda net: sum(b.float().sum() for b in net.buffers()),
    "named_buffers": lambda net: sum(b.float().sum() * len(n) for n, b in net.named_buffers()),
    "children": lambda net: sum(c.weight.sum() for c in net.children()),
    "named_children": lambda net: sum(c.weight.sum() * len(n) for n, c in net.named_children()),
    "modules": lambda net: sum(p.sum() for m in net.modules() for p in m.parameters(recurse=False)),
    "named_modules": lambda net: net.w.sum() * sum(len(n) for n, _ in net.named_modules()),
    "get_submodule": lambda net: net.get_submodule("inner").weight.sum(),
    "get_parameter": lambda net: net.get_parameter("inner.weight").sum(),
    "getattr": lambda net: getattr(net, "inner").weight.sum(),
    "hasattr": lambda net: net.w.sum() * hasattr(net, "inner") * (not hasattr(net, "nothing")),
    "registry": lambda net: net._parameters["w"].sum() + net._modules["out"].bias.sum(),
    "requires_grad": lambda net: net.w.sum() * all(p.requires_grad for p in net.parameters()),
    "training": lambda net: net.w.sum() * net.training,
    "isinstance": lambda net: net.w.sum() * isinstance(net.inner, torch.nn.Linear),
}


def test_modules_are_walked_in_a_graph(impl: Implementation) -> None:
    """A compiled function can list the modules of a network without breaking the graph."""
    net, walk = make_net(impl.nn, "free"), WALKS["modules"]
    compiled = torch.compile(walk, backend="eager", fullgraph=True)

    assert torch.equal(compiled(net), walk(net))


@pytest.mark.parametrize("walk", WALKS)
def test_traversal_inside(walk: str) -> None:
    """A compiled function that walks over the module's members sees what an eager one sees."""

    def scenario(impl: Implementation) -> tuple[Tensor, int, int]:
        net = make_net(impl.nn, "free")
        counter = CompileCounter()
        compiled = torch.compile(WALKS[walk], backend=counter, fullgraph=True)
        result = compiled(net)

        assert torch.equal(result, torch.as_tensor(WALKS[walk](net)))

        return result.detach(), counter.frame_count, counter.op_count

    agree(scenario)
