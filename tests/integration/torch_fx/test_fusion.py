import pytest
import torch

from tests.helpers import Implementation
from tests.integration.image_networks import image_net, images
from tests.integration.networks import agree


# The file that is imported compiles a class with TorchScript.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is")
def test_fuse() -> None:
    """The convolution takes over the weights of the normalization behind it."""
    from torch.fx.experimental import optimization

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        net.bn.running_mean.uniform_(-1, 1)
        fused = optimization.fuse(net)
        kinds = [type(module).__name__ for module in fused.modules()]
        return kinds, fused.code, net(x), fused(x)

    kinds, _, expected, output = agree(scenario)

    assert "BatchNorm2d" not in kinds
    torch.testing.assert_close(output, expected)
