import importlib
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
