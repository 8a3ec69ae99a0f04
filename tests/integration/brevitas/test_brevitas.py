import pytest
import torch

from tests.helpers import Implementation
from tests.integration.image_networks import image_net, images
from tests.integration.networks import agree


def test_layerwise_quantize() -> None:
    """Brevitas replaces each layer by its quantized one."""
    quantize = pytest.importorskip(
        "brevitas.graph.quantize", reason="needs brevitas: nox -s ecosystem installs it"
    )

    def scenario(impl: Implementation) -> tuple[list[str], torch.Tensor]:
        net = quantize.layerwise_quantize(image_net(impl.nn).eval())
        return [type(module).__name__ for module in net.modules()], net(images())

    kinds, _ = agree(scenario)

    assert kinds.count("QuantConv2d") == 2
    assert kinds.count("QuantLinear") == 1
