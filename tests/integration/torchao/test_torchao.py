import pytest

from tests.helpers import Implementation
from tests.integration.image_networks import image_net, images
from tests.integration.networks import agree


def test_int8_weight_only() -> None:
    """Torchao swaps the weights of the linear layers, which keep their class."""
    quantization = pytest.importorskip(
        "torchao.quantization", reason="needs torchao: nox -s ecosystem installs it"
    )

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
        weight = net.head.weight
        kept = type(net.head) is impl.nn.Linear
        return kept, type(weight).__name__, weight.dequantize(), repr(net), net(x)

    kept, kind, *_ = agree(scenario)

    assert kept
    assert kind == "Int8Tensor"
