import io
from pathlib import Path

import pytest
import torch

from tests.helpers import MODKIT, TORCH, Implementation, same
from tests.parity.note.networks import networks


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


def test_training_loop_brings_the_weights_closer_to_zero(impl: Implementation) -> None:
    """After the loop the last layer's weight is smaller and the network in evaluation mode."""
    torch.manual_seed(0)
    before = networks(impl).Net().l1.weight.detach().abs().sum()
    torch.manual_seed(0)
    net, _ = train(impl, steps=1000)

    assert net.l1.weight.abs().sum() < before
    assert not net.training
    assert not net.l0.training
    assert str(net.l1.weight).startswith("Parameter containing:\ntensor([[")
    assert net.l1.weight.shape == (3, 1)


def test_zeroing_gradients_between_steps(impl: Implementation) -> None:
    """`zero_grad` drops the gradients of all parameters, so each step starts anew."""
    net = networks(impl).Net()
    x = torch.ones(4)
    torch.abs(net(x)).backward()
    once = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()

    assert [p.grad for p in net.parameters()] == [None] * 4

    torch.abs(net(x)).backward()

    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), once, strict=True))


def test_module_that_depends_on_its_mode(impl: Implementation) -> None:
    """ModalModule adds a constant in training mode only."""
    m = networks(impl).ModalModule()
    x = torch.randn(4)

    assert m.training
    assert torch.equal(m(x), x + 1.0)

    m.eval()

    assert not m.training
    assert torch.equal(m(x), x)

    m.train()

    assert torch.equal(m(x), x + 1.0)


def test_saving_and_loading_a_trained_network(impl: Implementation, tmp_path: Path) -> None:
    """The state of a network goes through a file into a new one; the result says so."""
    net, _ = train(impl, steps=3)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    new_net = networks(impl).Net()
    result = new_net.load_state_dict(torch.load(tmp_path / "net.pt"))

    assert repr(result) == "<All keys matched successfully>"
    assert list(new_net.state_dict()) == ["l0.weight", "l0.bias", "l1.weight", "l1.bias"]
    assert all(map(torch.equal, net.parameters(), new_net.parameters()))
    assert torch.equal(net(torch.ones(4)), new_net(torch.ones(4)))


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


def test_running_mean_is_a_buffer(impl: Implementation) -> None:
    """The mean is registered as a buffer, starts at zero and is not a parameter."""
    m = networks(impl).RunningMean(4)

    assert [name for name, _ in m.named_buffers()] == ["mean"]
    assert list(m.parameters()) == []
    assert torch.equal(m.mean, torch.zeros(4))
    assert m.momentum == 0.9


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


def test_saving_and_loading_a_buffer(impl: Implementation, tmp_path: Path) -> None:
    """The running mean goes through a file into a new module."""
    m = networks(impl).RunningMean(4)
    for _ in range(10):
        m(torch.randn(4))
    torch.save(m.state_dict(), tmp_path / "mean.pt")
    m_loaded = networks(impl).RunningMean(4)
    m_loaded.load_state_dict(torch.load(tmp_path / "mean.pt"))

    assert torch.all(m.mean == m_loaded.mean)
    assert not torch.all(m.mean == 0.0)


def test_non_persistent_buffer_is_left_out_of_the_state(impl: Implementation) -> None:
    """persistent=False keeps a buffer out of state_dict, not out of named_buffers."""
    m = networks(impl).RunningMean(4)
    m.register_buffer("unserialized_thing", torch.randn(5), persistent=False)

    assert list(m.state_dict()) == ["mean"]
    assert [name for name, _ in m.named_buffers()] == ["mean", "unserialized_thing"]


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_buffers_move_and_cast_with_the_module(impl: Implementation, device: str) -> None:
    """`to` applies to persistent and non-persistent buffers alike."""
    m = networks(impl).RunningMean(4)
    m.register_buffer("unserialized_thing", torch.randn(5), persistent=False)
    m.to(device=device, dtype=torch.float64)

    assert {(b.device.type, b.dtype) for b in m.buffers()} == {(device, torch.float64)}
    assert m(torch.ones(4, device=device, dtype=torch.float64)).dtype == torch.float64


def test_iterating_over_named_buffers() -> None:
    """Each pair of named_buffers prints alike on both."""

    def scenario(impl: Implementation) -> list[str]:
        m = networks(impl).RunningMean(2)
        m.register_buffer("unserialized_thing", torch.ones(1), persistent=False)
        return [str(buffer) for buffer in m.named_buffers()]

    assert same(scenario) == same(
        lambda impl: ["('mean', tensor([0., 0.]))", "('unserialized_thing', tensor([1.]))"]
    )


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


@pytest.mark.parametrize("name", ["param3", "buffer3"])
def test_reserved_names_take_only_their_kind(name: str) -> None:
    """A None slot refuses other values, and takes one of its kind."""

    def scenario(impl: Implementation, value: object) -> object:
        m = networks(impl).StatefulModule()
        setattr(m, name, value)
        return list(m.state_dict())

    assert same(lambda impl: scenario(impl, "text"))[:2] == ("raised", "TypeError")
    assert same(lambda impl: scenario(impl, impl.own.Parameter(torch.ones(1))))[0] == "returned"


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
