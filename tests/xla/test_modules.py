import copy

import pytest
import torch

import modkit
from tests.helpers import Implementation
from tests.xla.recipes import counted, end_step, inputs, network, on_host, own_network


pytestmark = pytest.mark.xla


@pytest.mark.parametrize("source", ["cpu", "xla"])
@pytest.mark.parametrize("target", ["cpu", "xla"])
def test_load_between_devices(
    source: str, target: str, impl: Implementation, device: torch.device
) -> None:
    """`Module.load_state_dict` copies a state between host and device, with its errors."""
    places = {"cpu": torch.device("cpu"), "xla": device}
    state = own_network(impl, places[source]).state_dict()
    net = own_network(impl, places[target])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    keys = net.load_state_dict({**state, "more": torch.ones(1)}, strict=False)

    assert keys.unexpected_keys == ["more"]
    assert {one.device.type for one in net.state_dict().values()} == {target}
    torch.testing.assert_close(on_host(net.state_dict()), on_host(state), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({**state, "0.linear.weight": torch.ones(1, device=places[source])})


def test_a_load_reads_nothing(device: torch.device) -> None:
    """Loading from the host, or from the device, reads no tensor of the device."""
    net, state = network(device), network("cpu").state_dict()
    other = network(device).state_dict()
    end_step()
    with counted() as counts:
        modkit.load_state_dict(net, state)
        modkit.load_state_dict(net, other)
        end_step()

    assert counts.reads == 0


@pytest.mark.parametrize("training", [False, True])
def test_fast_inference(training: bool, impl: Implementation, device: torch.device) -> None:
    """The block gives what plain calls give, bit by bit, and reads nothing."""
    net = own_network(impl, device).train(training)
    x = inputs(device)
    twin = copy.deepcopy(net)
    expected = []
    with torch.no_grad():
        for _ in range(3):
            expected.append(twin(x))
            end_step()
    found = []
    with torch.no_grad(), modkit.fast_inference(net):
        for _ in range(2):
            found.append(net(x))
            end_step()
        with counted() as counts:
            found.append(net(x))
            end_step()

    assert (counts.compilations, counts.reads) == (0, 0)
    torch.testing.assert_close(on_host(found), on_host(expected), rtol=0, atol=0)
    torch.testing.assert_close(
        on_host(net.state_dict()), on_host(twin.state_dict()), rtol=0, atol=0
    )
