import pytest
import torch

from tests.helpers import Implementation, same
from tests.models import network, scaling


def test_compile_compiles_forward_on_call(impl: Implementation) -> None:
    """After `compile`, calls run the compiled forward and give the same values."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = network(impl).eval()
    x = torch.randn(4, 3)
    expected = model(x)

    assert graphs == []

    model.compile(backend=backend)

    assert torch.equal(model(x), expected)
    assert len(graphs) == 1
    assert torch.equal(model(x), expected)
    assert len(graphs) == 1


def test_compile_passes_arguments_to_torch_compile(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compile` hands the module's call and all arguments as they are to torch.compile."""
    received: list[tuple[object, ...]] = []

    def compiler(function, *args, **kwargs):
        received.append((function.__self__, args, kwargs))
        return lambda *values: ("compiled", values)

    monkeypatch.setattr(torch, "compile", compiler)
    module = scaling(impl)

    assert module.compile("positional", mode="default", dynamic=True) is None
    assert received == [(module, ("positional",), {"mode": "default", "dynamic": True})]
    assert module(1, 2) == ("compiled", (1, 2))


@pytest.mark.parametrize("kind", ["Linear", "Sequential", "BatchNorm1d"])
def test_compile_on_a_layer_does_what_torch_does(kind: str) -> None:
    """Layers accept `compile`; torch 2.13 runs them without a graph of their own."""
    build = {
        "Linear": lambda nn: nn.Linear(3, 3),
        "Sequential": lambda nn: nn.Sequential(nn.Linear(3, 3)),
        "BatchNorm1d": lambda nn: nn.BatchNorm1d(3),
    }[kind]

    def scenario(impl: Implementation) -> object:
        torch._dynamo.reset()
        graphs: list[object] = []
        layer = build(impl.nn)
        layer.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        return layer(torch.randn(4, 3)), len(graphs)

    assert same(scenario)[0] == "returned"
