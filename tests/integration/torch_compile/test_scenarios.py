from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.helpers import Implementation, freeze, seed_everything
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = compiled_tests
BATCH: Final = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)


def describe(graph: torch.fx.GraphModule) -> list[Any]:
    """Tell the nodes of a graph, and for each the modules that it was captured in.

    Only inputs are told by name: results are named after variables of the code that was captured.
    """
    return [
        (
            node.op,
            str(node.target),
            [
                (path, getattr(kind, "__name__", str(kind)).rpartition(".")[2])
                for path, kind in node.meta.get("nn_module_stack", {}).values()
            ],
        )
        for node in graph.graph.nodes
    ]


class Watch:
    """A backend that runs graphs as they are, and notes what dynamo has compiled, and how often."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.graphs: list[list[Any]] = []
        self.outputs: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        """Note a graph that dynamo has captured, and let it run as it is."""
        self.graphs.append(describe(graph))
        return graph.forward

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compile a function or a module, and note the outputs of its calls."""
        compiled = torch.compile(function, backend=self, **options)

        def call(*args: Any, **kwargs: Any) -> None:
            self.outputs.append(compiled(*args, **kwargs))

        return call

    def report(self) -> dict[str, Any]:
        """Tell outputs, graphs, and dynamo's counts of frames, breaks, and compilations."""
        return {
            "outputs": self.outputs,
            "graphs": self.graphs,
            "breaks": dict(counters["graph_break"]),
            "frames": dict(counters["frames"]),
            "stats": dict(counters["stats"]),
        }


def replaced_parameter(nn: ModuleType, watch: Watch) -> None:
    """Replace a parameter, in its registry too, and load others, after the first call."""
    net = make_net(nn, "free")
    call = watch.compile(net)
    call(BATCH)
    net.w = nn.Parameter(torch.full((6,), 2.0))
    call(BATCH)
    net.inner._parameters["weight"] = nn.Parameter(torch.full((6, 6), 2.0))
    net.inner.bias = None
    call(BATCH)
    net.load_state_dict({k: v.double() + 1 for k, v in net.state_dict().items()}, assign=True)
    call(BATCH.double())
    net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})
    call(BATCH.double())
    net.float()
    call(BATCH)


def iteration(nn: ModuleType, watch: Watch) -> None:
    """Walk over parameters, buffers, children and modules in ``forward``."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            total = sum(p.square().sum() for p in self.parameters())
            names = sum(len(name) for name, _ in self.named_parameters())
            depth = sum(1 for _ in self.modules()) + sum(1 for _ in self.named_children())
            return x * total + names + depth + sum(b.sum() for b in self.buffers())

    net = Net()
    call = watch.compile(net)
    call(BATCH)
    net.layers.append(nn.Linear(6, 6))
    call(BATCH)


def modes(nn: ModuleType, watch: Watch) -> None:
    """Switch between training and evaluation, freeze a weight, and change the batch size."""
    net = make_net(nn, "conv")
    call = watch.compile(net)
    for mode in (True, False, True):
        net.train(mode)
        call(make_batch("conv"))
    net.head.weight.requires_grad_(requires_grad=False)
    call(make_batch("conv"))
    call(make_batch("conv")[:3])
    call(make_batch("conv")[:2])


def compiled_children(nn: ModuleType, watch: Watch) -> None:
    """Compile children in place, and call them from their eager parent, around its graph breaks."""
    net = make_net(nn, "nested")
    net.blocks[0].act.forward = lambda x: (torch._dynamo.graph_break(), torch.relu(x))[1]
    for block in net.blocks:
        block.compile(backend=watch)
    watch.outputs.append(net(BATCH))
    net.blocks[0].linear.weight = nn.Parameter(torch.full((6, 6), 0.5))
    watch.outputs.append(net(BATCH))
    watch.outputs.append(list(net.state_dict()))


SCENARIOS: Final = (replaced_parameter, iteration, modes, compiled_children)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[ModuleType, Watch], None]) -> None:
    """Values, graphs, graph breaks, frames and recompilations are those of torch."""

    def watched(impl: Implementation) -> dict[str, Any]:
        watch = Watch()
        scenario(impl.nn, watch)
        return watch.report()

    report = agree(watched)

    eager = _eagerly(scenario)
    assert freeze(report["outputs"]) == freeze(eager)
    assert len(report["graphs"]) == report["stats"]["unique_graphs"]
    assert (len(report["breaks"]) > 0) == (scenario is compiled_children)


def _eagerly(scenario: Callable[[ModuleType, Watch], None]) -> list[Any]:
    """Run a scenario on torch without the compiler, and return its outputs."""
    seed_everything()
    watch = Watch()
    with torch.compiler.set_stance("force_eager"):
        scenario(torch.nn, watch)
    return watch.outputs


@pytest.mark.parametrize("network", NETWORKS)
def test_training_step(network: str) -> None:
    """Each network compiles to torch's graph, with torch's outputs, gradients and guards."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        torch._dynamo.reset()
        net, backend = make_net(impl.nn, network), CompileCounterWithBackend("eager")
        guards: list[int] = []
        compiled: Callable[[Tensor], Tensor] = torch._dynamo.optimize(
            backend, nopython=True, guard_export_fn=lambda found: guards.append(len(found))
        )(net)
        outputs = []
        for _ in range(2):
            output = compiled(make_batch(network))
            output.square().sum().backward()
            outputs.append(output.detach())
        (graph,) = backend.graphs
        nodes = [(node.op, str(node.target), node.name) for node in graph.graph.nodes]
        assert len(guards) == 1
        # A buffer that ``forward`` assigns is looked up in one class more.
        counts = [] if network == "free" else guards
        return outputs, gradients(net), dict(net.state_dict()), nodes, counts

    (output, _), grads, _, nodes, counts = agree(scenario)

    eager = make_net(torch.nn, network)
    assert freeze(output) == freeze(eager(make_batch(network)).detach())
    assert all(grad is not None for grad in grads.values())
    assert any(op == "placeholder" and "parameters" in target for op, target, _ in nodes)
    assert all(count > 0 for count in counts)
