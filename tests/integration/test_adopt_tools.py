import copy

import pytest
import torch
from torch import nn

import modkit
from tests.integration.torchscript import scripted_tests
from tests.unit.adoptable import Block, Net


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@scripted_tests
@pytest.mark.parametrize("tool", ["script", "trace"])
def test_torchscript(tool: str) -> None:
    """Scripting and tracing an adopted model give the code that they give for the original."""
    net = Net().eval()
    # TorchScript takes a list of modules for a value that it cannot have.
    del net.shared.parent
    convert = torch.jit.script if tool == "script" else lambda m: torch.jit.trace(m, X)
    expected, output = convert(copy.deepcopy(net)), net(X)

    converted = convert(modkit.adopt(net))

    assert converted.code == expected.code
    assert list(converted.state_dict()) == list(expected.state_dict())
    torch.testing.assert_close(converted(X), output)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_in_one_graph() -> None:
    """An adopted model compiles without a graph break, and trains with the same gradients."""
    net = Net()
    plain = copy.deepcopy(net)
    compiled = torch.compile(modkit.adopt(net), fullgraph=True, backend="aot_eager")

    output, expected = compiled(X), plain(X)
    output.sum().backward()
    expected.sum().backward()

    assert torch.equal(output, expected)
    for (name, found), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """The exported program of an adopted model is that of the original, names of modules too."""
    net = Net().eval()
    plain = torch.export.export(copy.deepcopy(net), (X,), strict=strict)

    exported = torch.export.export(modkit.adopt(net), (X,), strict=strict)

    assert exported.graph_module.code == plain.graph_module.code
    assert exported.graph_signature == plain.graph_signature
    assert torch.equal(exported.module()(X), net(X))


def test_fx_sees_the_same_leaves() -> None:
    """Layers are leaves for fx, and the user's modules are traced through, as before."""
    net = Net()
    net.bare = nn.Module()
    net.bare.forward = torch.relu
    expected = torch.fx.symbolic_trace(copy.deepcopy(net))

    traced = torch.fx.symbolic_trace(modkit.adopt(net))

    assert traced.code == expected.code
    assert torch.equal(traced(X), net(X))


def test_func() -> None:
    """``functional_call`` and ``vmap`` over stacked models work on adopted ones."""
    nets = [modkit.adopt(Block()) for _ in range(3)]
    # Torch warns that it has no fast way to batch this one.
    for block in nets:
        block.norm = nn.Identity()
    parameters, buffers = torch.func.stack_module_state(nets)

    outputs = torch.vmap(
        lambda p, b: torch.func.functional_call(nets[0], (p, b), (X,)), in_dims=(0, 0)
    )(parameters, buffers)

    torch.testing.assert_close(outputs, torch.stack([net(X) for net in nets]))


def test_data_parallel_replicas() -> None:
    """A replica of an adopted model is adopted, and computes the same."""
    net = modkit.adopt(Net())

    replica = net._replicate_for_data_parallel()

    assert type(replica) is type(net)
    assert torch.equal(replica(X), net(X))


def test_fast_attributes() -> None:
    """The fast mode takes an adopted model, and leaves it as it was."""
    net = modkit.adopt(Net())
    expected, before = net(X), [list(vars(module)) for module in net.modules()]

    with torch.inference_mode(), modkit.fast_attributes(net):
        output = net(X)

    assert torch.equal(output, expected)
    assert [list(vars(module)) for module in net.modules()] == before
