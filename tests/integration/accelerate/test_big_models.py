import pytest
import torch

from tests.helpers import Implementation
from tests.integration.image_networks import images, scaled_net
from tests.integration.networks import agree


REASON = "needs accelerate: nox -s ecosystem installs it"


def test_init_on_meta(impl: Implementation) -> None:
    """A user's module built in the block is on the meta device, and gets weights by loading."""
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    full, x = scaled_net(impl.nn).eval(), images()
    with accelerate.init_empty_weights(include_buffers=True):
        empty = scaled_net(impl.nn).eval()
    devices = {tensor.device.type for tensor in empty.state_dict().values()}

    for name, tensor in full.state_dict().items():
        accelerate.utils.set_module_tensor_to_device(empty, name, "cpu", value=tensor)

    assert devices == {"meta"}
    assert torch.equal(empty(x), full(x))


def test_cpu_offload() -> None:
    """Offloaded weights are there while a layer computes, and on the meta device otherwise."""
    accelerate = pytest.importorskip("accelerate", reason=REASON)

    def scenario(impl: Implementation) -> object:
        net, x = scaled_net(impl.nn).eval(), images()
        expected = net(x)
        accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
        output = net(x)
        devices = {name: p.device.type for name, p in net.named_parameters()}
        accelerate.hooks.remove_hook_from_submodules(net)
        return output, expected, devices, net.state_dict()

    output, expected, devices, _ = agree(scenario)

    assert torch.equal(output, expected)
    assert set(devices.values()) == {"meta"}
