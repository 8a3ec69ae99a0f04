import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net


# The package has a function of the same name, so an import statement does not find the module.
replicate_module = importlib.import_module("torch.nn.parallel.replicate")


@pytest.fixture
def _copies_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``replicate`` run without a GPU: tensors are cloned instead of sent to devices.

    Everything that ``replicate`` does with modules, registries and attributes stays as it is.
    """

    def broadcast(tensors: list[Any], devices: Any, detach: bool = False) -> list[list[Any]]:
        return [[t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices]

    monkeypatch.setattr(replicate_module, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(replicate_module, "_get_device_index", lambda device, optional: device)


@pytest.mark.usefixtures("_copies_on_cpu")
@for_each("network", NETWORKS)
def test_replicate(network: str) -> None:
    """Replicas compute like the original, and their gradients arrive at its parameters."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network).eval(), make_batch(network)
        replicas = replicate_module.replicate(net, [0, 1])
        outputs = [replica(batch) for replica in replicas]
        sum(outputs).square().sum().backward()

        for replica in replicas:
            assert type(replica) is type(net)
            assert [n for n, _ in replica.named_modules()] == [n for n, _ in net.named_modules()]
            assert list(replica.parameters()) == []
            assert type(replica._parameters) is dict
            assert replica._is_replica

        return outputs, gradients(net)

    outputs, grads = agree(scenario)

    eager = make_net(torch.nn, network).eval()
    expected = eager(make_batch(network))
    (2 * expected).square().sum().backward()
    assert freeze(outputs[0]) == freeze(expected)
    torch.testing.assert_close(grads, gradients(eager))


@pytest.mark.usefixtures("_copies_on_cpu")
def test_replicas_are_separate(impl: Implementation) -> None:
    """Writing buffers, attributes and children of a replica leaves the original alone."""
    net, batch = make_net(impl.nn, "free"), make_batch("free")
    (replica,) = replicate_module.replicate(net, [0], detach=True)
    replica(batch)
    replica.extra = 1
    replica.out = impl.nn.Identity()

    assert replica.counter == 1
    assert net.counter == 0
    assert not hasattr(net, "extra")
    assert type(net.out) is impl.nn.Linear
    assert isinstance(replica.w, torch.Tensor)


@pytest.mark.usefixtures("_copies_on_cpu")
def test_hooks_and_modes_are_replicated() -> None:
    """A replica has the original's hooks and mode."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested").eval(), make_batch("nested")
        net.blocks[0].register_forward_hook(lambda _m, _args, output: output * 2)
        replicas = replicate_module.replicate(net, [0, 1])
        outputs = parallel_apply_on_cpu(replicas, batch)
        return outputs, [module.training for module in replicas[0].modules()]

    outputs, modes = agree(scenario)

    assert freeze(outputs[0]) == freeze(outputs[1])
    assert not any(modes)


def parallel_apply_on_cpu(replicas: list[torch.nn.Module], batch: torch.Tensor) -> list[Any]:
    """Call each replica in a thread of its own, as ``parallel_apply`` does."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        return list(pool.map(lambda replica: replica(batch), replicas))


@pytest.mark.usefixtures("_copies_on_cpu")
def test_shared_children_stay_shared(impl: Implementation) -> None:
    """Tied weights and a module in two places are one object in a replica, too."""
    nn = impl.nn
    shared = nn.Linear(6, 6)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(6, 6))
    net[3].weight = shared.weight
    (replica,) = replicate_module.replicate(net, [0])

    assert replica[0] is replica[2]
    assert replica[0] is not shared
    assert replica[3].weight is replica[0].weight


def test_replica_protocol(impl: Implementation) -> None:
    """A shallow replica has registries of its own, no parameters, and the same other attributes."""
    net = make_net(impl.nn, "free")
    net.note = ["shared"]
    replica = net._replicate_for_data_parallel()

    assert type(replica) is type(net)
    assert replica.__dict__.keys() == {*net.__dict__, "_is_replica"}
    assert replica._parameters == {}
    assert replica._buffers == net._buffers
    assert replica._buffers is not net._buffers
    assert replica._modules == net._modules
    assert replica._modules is not net._modules
    assert replica.note is net.note


def test_recurrent_replica_has_flat_weights(impl: Implementation) -> None:
    """A replica of an LSTM has a list of flat weights of its own."""
    layer = impl.nn.LSTM(3, 4)
    replica = layer._replicate_for_data_parallel()

    assert replica._flat_weights == layer._flat_weights
    assert replica._flat_weights is not layer._flat_weights


def test_data_parallel_on_cpu() -> None:
    """``DataParallel`` without GPUs calls the module it holds, and prefixes its state."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        wrapper = impl.nn.DataParallel(make_net(impl.nn, "conv"))
        output = wrapper(make_batch("conv"))
        output.sum().backward()
        return output, gradients(wrapper), dict(wrapper.state_dict())

    _, grads, _ = agree(scenario)

    assert all(name.startswith("module.") for name in grads)
