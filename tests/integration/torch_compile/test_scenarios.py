from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from tests.helpers import Implementation, freeze, seed_everything
from tests.integration.networks import agree, make_batch, make_net
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
    """Replace a parameter by assignment and one in its registry, after the first call."""
    net = make_net(nn, "free")
    call = watch.compile(net)
    call(BATCH)
    net.w = nn.Parameter(torch.full((6,), 2.0))
    call(BATCH)
    net.inner._parameters["weight"] = nn.Parameter(torch.full((6, 6), 2.0))
    call(BATCH)
    net.inner.bias = None
    call(BATCH)


def replaced_module(nn: ModuleType, watch: Watch) -> None:
    """Replace a child by one of the same kind and by one of another."""
    net = make_net(nn, "nested")
    call = watch.compile(net)
    call(BATCH)
    net.heads["left"] = nn.Linear(6, 3, bias=False)
    call(BATCH)
    net.blocks[0] = nn.Identity()
    call(BATCH)


def written_buffers(nn: ModuleType, watch: Watch) -> None:
    """Write buffers in ``forward``: by assignment, in the registry, and in place."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("assigned", "entered", "added"):
                self.register_buffer(name, torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.assigned = self.assigned + x.mean(0)
            self._buffers["entered"] = self.entered + x.amax(0)
            self.added += 1
            return x + self.assigned + self.entered + self.added

    net = Net()
    call = watch.compile(net)
    for _ in range(3):
        call(BATCH)
    watch.outputs.append(dict(net.named_buffers()))


def plain_attributes(nn: ModuleType, watch: Watch) -> None:
    """Read attributes in ``forward`` that change between the calls, and write one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.scale, self.flip, self.kind, self.calls = 2.0, False, "relu", 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = getattr(nn.functional, self.kind)(self.inner(x)) * self.scale
            return -x if self.flip else x

    net = Net()
    call = watch.compile(net)
    for name, value in {"scale": 3.0, "flip": True, "kind": "silu", "training": False}.items():
        call(BATCH)
        setattr(net, name, value)
    call(BATCH)
    watch.outputs.append(net.calls)


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


def three_instances(nn: ModuleType, watch: Watch) -> None:
    """Call three instances of one class, in one function and each on its own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

    blocks = [Block() for _ in range(3)]
    watch.compile(lambda x: blocks[2](blocks[1](blocks[0](x))))(BATCH)
    for block in blocks:
        watch.compile(block)(BATCH)


def hooks(nn: ModuleType, watch: Watch) -> None:
    """Register hooks of each kind, on the network and below it, and remove them."""
    net = make_net(nn, "nested")
    call = watch.compile(net)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        for place in (net, net.blocks[1], net.heads["left"]):
            handles = [
                place.register_forward_hook(lambda _m, _args, out: out * 2),
                place.register_forward_pre_hook(lambda _m, args: (-args[0],)),
                place.register_forward_hook(
                    lambda _m, _args, _kwargs, out: out + 1, with_kwargs=True
                ),
            ]
            call(BATCH)
            for handle in handles:
                handle.remove()
            call(BATCH)


def parametrized(nn: ModuleType, watch: Watch) -> None:
    """Compile a parametrized layer and a weight-normalized one, and take one back."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    torch.nn.utils.parametrizations.weight_norm(net[1])
    call = watch.compile(net)
    call(BATCH)
    parametrize.remove_parametrizations(net[0], "weight")
    call(BATCH)


def functional_call(nn: ModuleType, watch: Watch) -> None:
    """Call with other weights inside a compiled function, and take the gradient of one."""
    net = make_net(nn, "nested")
    other = {name: p.detach() * 2 for name, p in net.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().sum()

    watch.compile(loss)(other, BATCH)
    watch.compile(torch.func.grad(loss))(other, BATCH)
    watch.compile(loss)(dict(net.named_parameters()), BATCH)


def broken_graph(nn: ModuleType, watch: Watch) -> None:
    """Break the graph in the middle of a network, between two layers and inside of one."""

    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            torch._dynamo.graph_break()
            return torch.relu(x)

    net = nn.Sequential(nn.Linear(6, 6), Breaking(), nn.Linear(6, 3))
    call = watch.compile(net)
    call(BATCH)
    call(BATCH * 2)


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
    """Compile children in place, and call them from their eager parent."""
    net = make_net(nn, "nested")
    for block in net.blocks:
        block.compile(backend=watch)
    watch.outputs.append(net(BATCH))
    net.blocks[0].linear.weight = nn.Parameter(torch.full((6, 6), 0.5))
    watch.outputs.append(net(BATCH))


SCENARIOS: Final = (
    replaced_parameter,
    replaced_module,
    written_buffers,
    plain_attributes,
    iteration,
    three_instances,
    hooks,
    parametrized,
    functional_call,
    broken_graph,
    modes,
    compiled_children,
)


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
    assert (len(report["breaks"]) > 0) == (scenario is broken_graph)


def _eagerly(scenario: Callable[[ModuleType, Watch], None]) -> list[Any]:
    """Run a scenario on torch without the compiler, and return its outputs."""
    seed_everything()
    watch = Watch()
    with torch.compiler.set_stance("force_eager"):
        scenario(torch.nn, watch)
    return watch.outputs


NETS: Final = ("conv", "nested", "transformer")


@pytest.mark.parametrize("network", NETS)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
def test_export(network: str, strict: bool) -> None:
    """The exported graph has torch's inputs, operations and stacks of modules."""

    def scenario(impl: Implementation) -> tuple[Any, Tensor]:
        net, batch = make_net(impl.nn, network).eval(), make_batch(network)
        program = torch.export.export(net, (batch,), strict=strict)
        signature = program.graph_signature
        inputs = signature.inputs_to_parameters, signature.inputs_to_buffers
        return (describe(program.graph_module), inputs), program.module()(batch)

    (nodes, _), output = agree(scenario)

    assert torch.equal(output, make_net(torch.nn, network).eval()(make_batch(network)))
    assert any(stack for *_, stack in nodes)


@pytest.mark.parametrize("network", NETS)
def test_make_fx(network: str) -> None:
    """``make_fx`` records the operations that it records in torch, backward included."""

    def scenario(impl: Implementation) -> tuple[list[Any], Any]:
        net, batch = make_net(impl.nn, network).eval(), make_batch(network)
        weights = {name: p.detach() for name, p in net.named_parameters()}

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(net, weights, (batch,)).square().sum()

        graph = make_fx(torch.func.grad(loss))(weights)
        return describe(graph), graph(weights)

    nodes, grads = agree(scenario)

    assert len(nodes) > len(grads) > 0
