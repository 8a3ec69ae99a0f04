import textwrap

import pytest
import torch

from tests.helpers import MODKIT, Implementation, same
from tests.parity.note.networks import networks


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def test_simple_custom_module(impl: Implementation) -> None:
    """MyLinear holds the two parameters that it assigned, and nothing else."""
    m = networks(impl).MyLinear(4, 3)

    assert {name: tuple(p.shape) for name, p in m.named_parameters()} == {
        "weight": (4, 3),
        "bias": (3,),
    }
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in m.parameters())
    assert list(m.buffers()) == list(m.children()) == []
    assert repr(m) == "MyLinear()"


def test_calling_a_custom_module(impl: Implementation) -> None:
    """Calling MyLinear is its forward: an affine transformation that autograd recorded."""
    m = networks(impl).MyLinear(4, 3)
    sample_input = torch.randn(4)
    output = m(sample_input)

    assert output.shape == (3,)
    assert output.grad_fn.name() == "AddBackward0"
    assert torch.equal(output, sample_input @ m.weight + m.bias)


def test_printing_named_parameters(impl: Implementation) -> None:
    """Iterating over named_parameters gives pairs that print as a name and a Parameter."""
    m = networks(impl).MyLinear(4, 3)
    pairs = list(m.named_parameters())

    assert [type(pair) for pair in pairs] == [tuple, tuple]
    assert str(pairs[0]).startswith("('weight', Parameter containing:\ntensor([[")
    assert str(pairs[1]).startswith("('bias', Parameter containing:\ntensor([")
    assert all(str(pair).endswith("requires_grad=True))") for pair in pairs)


def test_sequential_chain_of_custom_modules(impl: Implementation) -> None:
    """Sequential feeds the output of each module to the next."""
    MyLinear = networks(impl).MyLinear
    net = impl.own.Sequential(MyLinear(4, 3), impl.own.ReLU(), MyLinear(3, 1))
    sample_input = torch.randn(4)
    output = net(sample_input)

    assert output.shape == (1,)
    assert output.grad_fn.name() == "AddBackward0"
    assert torch.equal(output, net[2](net[1](net[0](sample_input))))
    assert repr(net) == "Sequential(\n  (0): MyLinear()\n  (1): ReLU()\n  (2): MyLinear()\n)"


def test_network_as_a_custom_module(impl: Implementation) -> None:
    """Net calls its two children and a function of nn.functional."""
    net = networks(impl).Net()
    x = torch.randn(4)

    assert torch.equal(net(x), net.l1(torch.relu(net.l0(x))))


def test_printing_named_children(impl: Implementation) -> None:
    """The children of Net print as in the note."""
    net = networks(impl).Net()

    assert [str(child) for child in net.named_children()] == [
        "('l0', MyLinear())",
        "('l1', MyLinear())",
    ]
    assert list(net.children()) == [net.l0, net.l1]


def test_printing_named_modules(impl: Implementation) -> None:
    """All modules of BigNet print as in the note, the network itself under the empty name."""
    big_net = networks(impl).BigNet()

    assert "\n".join(str(module) for module in big_net.named_modules()) == textwrap.dedent(
        """\
        ('', BigNet(
          (l1): MyLinear()
          (net): Net(
            (l0): MyLinear()
            (l1): MyLinear()
          )
        ))
        ('l1', MyLinear())
        ('net', Net(
          (l0): MyLinear()
          (l1): MyLinear()
        ))
        ('net.l0', MyLinear())
        ('net.l1', MyLinear())"""
    )
    assert len(list(big_net.modules())) == 5


@pytest.mark.parametrize(
    ("act", "function"),
    [("relu", torch.nn.functional.relu), ("lrelu", torch.nn.functional.leaky_relu)],
)
def test_dynamic_network(impl: Implementation, act: str, function) -> None:
    """DynamicNet runs its list of layers, then the activation chosen by name."""
    dynamic_net = networks(impl).DynamicNet(3)
    sample_input = torch.randn(4)
    output = dynamic_net(sample_input, act)

    expected = sample_input
    for linear in dynamic_net.linears:
        expected = linear(expected)

    assert torch.equal(output, dynamic_net.final(function(expected)))


def test_dynamic_network_refuses_an_unknown_activation() -> None:
    """A name that is not in the ModuleDict is its KeyError."""
    assert same(lambda impl: networks(impl).DynamicNet(1)(torch.randn(4), "gelu")) == (
        "raised",
        "KeyError",
        "'gelu'",
    )


def test_named_parameters_include_those_of_children(impl: Implementation) -> None:
    """The parameters of DynamicNet have the names and shapes that the note prints."""
    dynamic_net = networks(impl).DynamicNet(3)

    assert [(name, tuple(p.shape)) for name, p in dynamic_net.named_parameters()] == [
        ("linears.0.weight", (4, 4)),
        ("linears.0.bias", (4,)),
        ("linears.1.weight", (4, 4)),
        ("linears.1.bias", (4,)),
        ("linears.2.weight", (4, 4)),
        ("linears.2.bias", (4,)),
        ("final.weight", (4, 1)),
        ("final.bias", (1,)),
    ]


@DEVICES
def test_moving_and_casting_all_parameters(impl: Implementation, device: str) -> None:
    """`to` moves to a device and casts, in place, keeping the Parameter objects' names."""
    dynamic_net = networks(impl).DynamicNet(3)

    assert dynamic_net.to(device=device) is dynamic_net
    assert {p.device.type for p in dynamic_net.parameters()} == {device}

    dynamic_net.to(dtype=torch.float64)
    output = dynamic_net(torch.randn(5, 4, device=device, dtype=torch.float64), "relu")

    assert {p.dtype for p in dynamic_net.parameters()} == {torch.float64}
    assert (output.dtype, output.device.type, output.shape) == (torch.float64, device, (5, 1))


def test_casting_keeps_the_values() -> None:
    """float32 to float64 is exact, equal on both implementations, outputs too."""

    def scenario(impl: Implementation) -> object:
        dynamic_net = networks(impl).DynamicNet(3)
        x = torch.randn(5, 4)
        before = dict(dynamic_net.state_dict())
        dynamic_net.to(dtype=torch.float64)
        return before, dynamic_net, dynamic_net(x.double(), "relu")

    kind, _ = same(scenario)

    assert kind == "returned"


def test_applying_a_function_to_all_modules(impl: Implementation) -> None:
    """`apply` calls the function for children before parents, and returns the network."""
    nn = impl.own
    called: list[str] = []

    @torch.no_grad()
    def init_weights(m) -> None:
        called.append(type(m).__name__)
        if isinstance(m, nn.Linear):
            nn.init.xavier_normal_(m.weight)
            m.bias.fill_(0.0)

    dynamic_net = networks(impl).DynamicNet(2)
    before = [p.clone() for p in dynamic_net.parameters()]

    assert dynamic_net.apply(init_weights) is dynamic_net
    assert called == [
        "MyLinear",
        "MyLinear",
        "ModuleList",
        "ReLU",
        "LeakyReLU",
        "ModuleDict",
        "MyLinear",
        "DynamicNet",
    ]
    # MyLinear is not an nn.Linear, so the note's function leaves this network unchanged.
    assert all(map(torch.equal, dynamic_net.parameters(), before))


def test_applying_an_initialization_to_linear_layers() -> None:
    """On nn.Linear layers the note's function sets weights and zeroes biases, bit by bit alike."""

    def scenario(impl: Implementation) -> object:
        nn = impl.own

        @torch.no_grad()
        def init_weights(m) -> None:
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                m.bias.fill_(0.0)

        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)).apply(init_weights)

    network = scenario(MODKIT)

    assert same(scenario)[0] == "returned"
    assert network[0].bias.tolist() == [0.0, 0.0, 0.0]
    assert network[0].weight.abs().min() > 0.0


def test_outputs_of_all_networks_are_the_same() -> None:
    """With equal seeds, every network of the section is bitwise identical on both."""

    def scenario(impl: Implementation) -> object:
        note = networks(impl)
        sequential = impl.own.Sequential(note.MyLinear(4, 3), impl.own.ReLU(), note.MyLinear(3, 1))
        x = torch.randn(4)
        return (
            note.MyLinear(4, 3)(x),
            sequential(x),
            note.Net()(x),
            note.BigNet()(torch.randn(5)),
            note.DynamicNet(3)(x, "relu"),
            note.DynamicNet(3)(x, "lrelu"),
        )

    assert same(scenario)[0] == "returned"
