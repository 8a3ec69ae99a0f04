import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import modkit
from tests.helpers import Implementation, freeze
from tests.integration.dynamo import compiled_tests
from tests.integration.torchscript import scripted_tests


pytestmark = compiled_tests


def make_net(impl: Implementation) -> torch.nn.Module:
    """Build a network that reads a free parameter and a buffer besides calling layers."""
    nn = impl.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.gate = Gate()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.body(x))

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))
            self.register_buffer("offset", torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tanh(self.weight) + self.offset

    return Net()


INPUT = torch.linspace(0, 1, 8).reshape(2, 4)


def calling(net: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function, which is no module, that calls the network."""

    def call(x: Tensor) -> Tensor:
        return net(x)

    return call


def compile_method(net: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    """Compile in place, by the method of the module."""
    net.compile(backend="eager")
    return net


def export(net: torch.nn.Module, *, strict: bool) -> Callable[[Tensor], Tensor]:
    """Export, and return the module that the exported program makes."""
    return torch.export.export(net, (INPUT,), strict=strict).module()


TOOLS: dict[str, Callable[[torch.nn.Module], Callable[[Tensor], Tensor]]] = {
    "compile": lambda net: torch.compile(net, backend="eager"),
    "compile, one graph": lambda net: torch.compile(net, backend="eager", fullgraph=True),
    "compile, a function": lambda net: torch.compile(calling(net), backend="eager"),
    "compile, a method": compile_method,
    "compile, aot_eager": lambda net: torch.compile(net, backend="aot_eager"),
    "export": lambda net: export(net, strict=False),
    "strict export": lambda net: export(net, strict=True),
    "symbolic_trace": fx.symbolic_trace,
    "a tracer": lambda net: fx.GraphModule(net, fx.Tracer().trace(net)),
    "script": torch.jit.script,
    "trace": lambda net: torch.jit.trace(net, INPUT),
}


# Dynamo does not compile a frame of torch's own layers when they are compiled in place.
PARTS = [
    (tool, part)
    for tool in TOOLS
    for part in ("", "gate", "body", "body.0")
    if not (tool == "compile, a method" and part.startswith("body"))
]


@scripted_tests
@pytest.mark.parametrize(("tool", "part"), PARTS)
def test_tools_are_refused(impl: Implementation, tool: str, part: str) -> None:
    """Compiling, exporting, tracing or scripting any module of the tree names the way out."""
    net = make_net(impl)

    with (
        modkit.fast_attributes(net),
        pytest.raises(RuntimeError, match="leave the fast_attributes block first"),
    ):
        TOOLS[tool](net.get_submodule(part))(INPUT)


@scripted_tests
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_are_refused_around_the_block(impl: Implementation, tool: str) -> None:
    """A model of which only a part is inside a block is refused as well."""
    net = make_net(impl)

    with (
        modkit.fast_attributes(net.gate),
        pytest.raises(RuntimeError, match="leave the fast_attributes block first"),
    ):
        TOOLS[tool](net)(INPUT)


@scripted_tests
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_work_afterwards(impl: Implementation, tool: str) -> None:
    """After the block each tool sees the weights as weights, also where it was refused before."""
    net = make_net(impl)
    with modkit.fast_attributes(net), pytest.raises(RuntimeError):
        TOOLS[tool](net)(INPUT)
    torch._dynamo.reset()

    result = TOOLS[tool](net)
    before = result(INPUT), net(INPUT)
    with torch.no_grad():
        net.gate.weight.add_(1.0)
    after = result(INPUT), net(INPUT)

    torch.testing.assert_close(*before)
    # An exported program holds the same parameters, and so has changed along with the model.
    torch.testing.assert_close(*after)


@pytest.mark.parametrize("tool", ["compile", "compile, a function", "compile, a method"])
def test_what_was_compiled_before_is_right_or_refused(impl: Implementation, tool: str) -> None:
    """A call of compiled code inside the block gives the current values or names the way out."""
    net = make_net(impl)
    compiled = TOOLS[tool](net)
    compiled(INPUT)

    with modkit.fast_attributes(net):
        with torch.no_grad():
            net.gate.weight.add_(1.0)
        try:
            inside = compiled(INPUT)
        except RuntimeError as error:
            inside = str(error)
    expected = make_net(impl)
    expected.load_state_dict(net.state_dict())

    if isinstance(inside, str):
        assert "leave the fast_attributes block first" in inside
    else:
        torch.testing.assert_close(inside, expected(INPUT))
    torch.testing.assert_close(compiled(INPUT), expected(INPUT))


@pytest.mark.parametrize("tool", ["compile", "compile, a method"])
def test_a_compiled_part_is_left_alone(impl: Implementation, tool: str) -> None:
    """A model may hold a compiled module: it runs inside the block, and is not compiled again."""
    net, counter = make_net(impl), torch._dynamo.testing.CompileCounter()
    expected = net(INPUT)
    if tool == "compile":
        net.gate = torch.compile(net.gate, backend=counter)
    else:
        net.gate.compile(backend=counter)
    net(INPUT)

    with modkit.fast_attributes(net):
        inside = net(INPUT)
        mirrored = "body" in vars(net), "weight" in vars(getattr(net.gate, "_orig_mod", net.gate))

    assert torch.equal(inside, expected)
    assert mirrored == (True, False)
    assert counter.frame_count == 1


@scripted_tests
def test_a_scripted_part_is_left_alone(impl: Implementation) -> None:
    """A ScriptModule in the tree keeps its state, which Python only shows, and runs."""
    net = make_net(impl)
    expected = net(INPUT)
    net.gate = torch.jit.script(net.gate)
    before = list(vars(net.gate))

    with modkit.fast_attributes(net):
        inside = net(INPUT)
        during = list(vars(net.gate))

    assert torch.equal(inside, expected)
    assert before == during == list(vars(net.gate))


@scripted_tests
def test_tracing_a_function_that_calls_the_model(impl: Implementation) -> None:
    """Where torch takes the weights for constants anyway, the result is that of torch."""
    net = make_net(impl).requires_grad_(False)
    # The lines of the source, which differ, stand in comments.
    graph = lambda traced: re.sub(r" +#.*", "", str(traced.inlined_graph))
    plain = torch.jit.trace(calling(net), INPUT)

    with modkit.fast_attributes(net):
        traced = torch.jit.trace(calling(net), INPUT)

    assert graph(traced) == graph(plain)


def test_make_fx_of_a_function_that_calls_the_model(impl: Implementation) -> None:
    """A trace of operations, which has the weights as constants, is the same inside."""
    net = make_net(impl)
    plain = make_fx(calling(net))(INPUT)

    with modkit.fast_attributes(net):
        traced = make_fx(calling(net))(INPUT)

    assert traced.code == plain.code
    assert freeze(traced(INPUT)) == freeze(net(INPUT))


def test_transforms_of_functions(impl: Implementation) -> None:
    """Gradients with respect to the input, and maps over it, need no change of the members."""
    net = make_net(impl)
    loss: Any = lambda x: net(x).sum()
    expected = torch.func.vmap(torch.func.grad(loss))(INPUT)

    with modkit.fast_attributes(net):
        inside = torch.func.vmap(torch.func.grad(loss))(INPUT)

    assert torch.equal(inside, expected)
