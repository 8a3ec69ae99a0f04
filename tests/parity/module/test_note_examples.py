import functools
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import MODKIT, TORCH, Implementation, same


@functools.cache
def networks(impl: Implementation) -> SimpleNamespace:
    """Define the note's classes on `impl.own`."""
    return SimpleNamespace(**_building_blocks(impl), **_stateful_modules(impl))


def _building_blocks(impl: Implementation) -> dict[str, type]:
    nn = impl.own
    F = impl.submodule("nn.functional")

    class MyLinear(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(in_features, out_features))
            self.bias = nn.Parameter(torch.randn(out_features))

        def forward(self, x):
            return (x @ self.weight) + self.bias

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l0 = MyLinear(4, 3)
            self.l1 = MyLinear(3, 1)

        def forward(self, x):
            x = self.l0(x)
            x = F.relu(x)
            return self.l1(x)

    class BigNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = MyLinear(5, 4)
            self.net = Net()

        def forward(self, x):
            return self.net(self.l1(x))

    class DynamicNet(nn.Module):
        def __init__(self, num_layers):
            super().__init__()
            self.linears = nn.ModuleList([MyLinear(4, 4) for _ in range(num_layers)])
            self.activations = nn.ModuleDict({"relu": nn.ReLU(), "lrelu": nn.LeakyReLU()})
            self.final = MyLinear(4, 1)

        def forward(self, x, act):
            for linear in self.linears:
                x = linear(x)
            x = self.activations[act](x)
            return self.final(x)

    return {"MyLinear": MyLinear, "Net": Net, "BigNet": BigNet, "DynamicNet": DynamicNet}


def _stateful_modules(impl: Implementation) -> dict[str, type]:
    nn = impl.own

    class ModalModule(nn.Module):
        def __init__(self):
            super().__init__()

        def forward(self, x):
            if self.training:
                return x + 1.0
            return x

    class RunningMean(nn.Module):
        def __init__(self, num_features, momentum=0.9):
            super().__init__()
            self.momentum = momentum
            self.register_buffer("mean", torch.zeros(num_features))

        def forward(self, x):
            self.mean = self.momentum * self.mean + (1.0 - self.momentum) * x
            return self.mean

    class StatefulModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.param1 = nn.Parameter(torch.randn(2))
            self.register_parameter("param2", nn.Parameter(torch.randn(3)))
            self.register_parameter("param3", None)
            self.param_list = nn.ParameterList([nn.Parameter(torch.randn(2)) for i in range(3)])
            self.param_dict = nn.ParameterDict(
                {"foo": nn.Parameter(torch.randn(3)), "bar": nn.Parameter(torch.randn(4))}
            )
            self.register_buffer("buffer1", torch.randn(4), persistent=True)
            self.register_buffer("buffer2", torch.randn(5), persistent=False)
            self.register_buffer("buffer3", None)
            self.linear = nn.Linear(2, 3)

    return {
        "ModalModule": ModalModule,
        "RunningMean": RunningMean,
        "StatefulModule": StatefulModule,
    }


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


def train(impl: Implementation, steps: int) -> tuple[torch.nn.Module, list[float]]:
    """Run the note's training loop for some steps; return the network and its losses."""
    net = networks(impl).Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, weight_decay=1e-2, momentum=0.9)
    losses = []
    for _ in range(steps):
        output = net(torch.randn(4))
        loss = torch.abs(output)
        net.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    return net, losses


def test_training_loop_gives_the_same_losses_and_weights() -> None:
    """The loop that trains the network to return zero is bitwise identical on both."""
    kind, value = same(lambda impl: train(impl, steps=500))

    assert kind == "returned"
    assert len(value[1][1][1]) == 500


@pytest.mark.parametrize(("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=str)
def test_file_of_one_implementation_loads_into_the_other(source, target, tmp_path: Path) -> None:
    """The note's checkpoints are exchangeable between torch and modkit."""
    for name, arguments in {"Net": (), "DynamicNet": (2,), "StatefulModule": ()}.items():
        written = getattr(networks(source), name)(*arguments)
        torch.save(written.state_dict(), tmp_path / name)
        read = getattr(networks(target), name)(*arguments)
        result = read.load_state_dict(torch.load(tmp_path / name))

        assert repr(result) == "<All keys matched successfully>"
        assert all(map(torch.equal, written.state_dict().values(), read.state_dict().values()))


def test_assigning_to_a_buffer_keeps_it_registered(impl: Implementation) -> None:
    """Forward assigns a new tensor to the buffer, which is what state_dict then has."""
    m = networks(impl).RunningMean(4)
    expected = torch.zeros(4)
    for _ in range(10):
        x = torch.randn(4)
        m(x)
        expected = 0.9 * expected + (1.0 - 0.9) * x

    assert list(m.state_dict()) == ["mean"]
    assert torch.equal(m.state_dict()["mean"], expected)
    assert "mean" not in m.__dict__


def test_all_kinds_of_state_through_a_file(impl: Implementation, tmp_path: Path) -> None:
    """StatefulModule saves all but non-persistent buffers and the reserved None entries."""
    StatefulModule = networks(impl).StatefulModule
    m = StatefulModule()
    torch.save(m.state_dict(), tmp_path / "state.pt")
    m_loaded = StatefulModule()
    m_loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    state = m_loaded.state_dict()

    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "param1": (2,),
        "param2": (3,),
        "buffer1": (4,),
        "param_list.0": (2,),
        "param_list.1": (2,),
        "param_list.2": (2,),
        "param_dict.foo": (3,),
        "param_dict.bar": (4,),
        "linear.weight": (3, 2),
        "linear.bias": (3,),
    }
    assert all(torch.equal(value, m.state_dict()[name]) for name, value in state.items())
    assert not torch.equal(m.buffer2, m_loaded.buffer2)


def test_states_and_reprs_of_the_section_are_the_same() -> None:
    """Seeded alike, all of the section's modules have the same state, order and text on both."""

    def scenario(impl: Implementation) -> object:
        note = networks(impl)
        mean = note.RunningMean(4)
        for _ in range(10):
            mean(torch.randn(4))
        stateful = note.StatefulModule()
        buffer = io.BytesIO()
        torch.save(stateful.state_dict(), buffer)
        return mean, stateful, dict(stateful.named_parameters()), len(buffer.getvalue())

    assert same(scenario)[0] == "returned"


def test_skipping_the_default_initialization() -> None:
    """skip_init leaves the values to a custom initialization, here an orthogonal one."""

    def scenario(impl: Implementation) -> object:
        m = impl.submodule("nn.utils").skip_init(impl.nn.Linear, 5, 3)
        impl.nn.init.orthogonal_(m.weight)
        impl.nn.init.zeros_(m.bias)
        return m

    m = scenario(MODKIT)

    assert same(scenario)[0] == "returned"
    assert type(m) is MODKIT.nn.Linear
    assert torch.allclose(m.weight @ m.weight.T, torch.eye(3), atol=1e-6)
    assert {p.device.type for p in m.parameters()} == {"cpu"}


def test_skip_init_draws_no_random_numbers(impl: Implementation) -> None:
    """The layer's own initialization does not run: the generator is where it was."""
    before = torch.get_rng_state()
    impl.submodule("nn.utils").skip_init(impl.own.Linear, 5, 3)

    assert torch.equal(torch.get_rng_state(), before)


def forward_pre_hook(m, inputs):
    """Add one to the input."""
    return inputs[0] + 1.0


def forward_hook(m, inputs, output):
    """Make a residual connection."""
    return output + inputs[0]


def backward_hook(m, grad_inputs, grad_outputs):
    """Replace all gradients with respect to inputs by 42."""
    return [torch.ones_like(gi) * 42.0 for gi in grad_inputs]


def hook_example(impl: Implementation) -> dict[str, torch.Tensor]:
    """Run the note's hook example and collect what it prints."""
    torch.manual_seed(1)
    m = impl.own.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    printed = {"no forward hooks": m(x)}
    forward_pre_hook_handle = m.register_forward_pre_hook(forward_pre_hook)
    printed["forward pre hook"] = m(x)
    forward_hook_handle = m.register_forward_hook(forward_hook)
    printed["both forward hooks"] = m(x)
    forward_pre_hook_handle.remove()
    forward_hook_handle.remove()
    printed["after removing"] = m(x)
    m(x).sum().backward()
    printed["x.grad with no backwards hook"] = x.grad.clone()
    m.zero_grad()
    x.grad.zero_()
    m.register_full_backward_hook(backward_hook)
    m(x).sum().backward()
    printed["x.grad with backwards hook"] = x.grad
    return printed


# Output printed in the note, which is determined by its seed.
PRINTED = {
    "no forward hooks": [[-0.5059, -0.8158, 0.2390], [-0.0043, 0.4724, -0.1714]],
    "forward pre hook": [[-0.5752, -0.7421, 0.4942], [-0.0736, 0.5461, 0.0838]],
    "both forward hooks": [[-1.0980, 0.6396, 0.4666], [0.3634, 0.6538, 1.0256]],
    "after removing": [[-0.5059, -0.8158, 0.2390], [-0.0043, 0.4724, -0.1714]],
    "x.grad with no backwards hook": [[0.4497, -0.5046, 0.3146]] * 2,
    "x.grad with backwards hook": [[42.0, 42.0, 42.0]] * 2,
}


@pytest.mark.parametrize("step", PRINTED)
def test_hook_example_prints_the_values_of_the_note(impl: Implementation, step: str) -> None:
    """Forward and backward hooks give the very numbers that the note shows."""
    torch.testing.assert_close(
        hook_example(impl)[step].detach(), torch.tensor(PRINTED[step]), atol=5.1e-5, rtol=0.0
    )
    assert sorted(hook_example(impl)) == sorted(PRINTED)


def test_hook_example_is_the_same_to_the_last_bit() -> None:
    """All six tensors of the hook example are equal on both implementations."""
    assert same(hook_example)[0] == "returned"


def test_hook_example_names_the_nodes_of_the_note(impl: Implementation) -> None:
    """The outputs come from the autograd nodes that the note shows."""
    printed = hook_example(impl)

    assert [printed[step].grad_fn.name() for step in list(PRINTED)[:4]] == [
        "AddmmBackward0",
        "AddmmBackward0",
        "AddBackward0",
        "AddmmBackward0",
    ]
