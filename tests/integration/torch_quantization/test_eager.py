import pytest
import torch
from torch import Tensor

from tests.helpers import Implementation
from tests.integration.networks import agree


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:.*reduce_range will be deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel"),
    pytest.mark.skipif(
        torch.backends.quantized.engine == "none", reason="torch has no quantized kernels here"
    ),
]


def build(impl: Implementation) -> torch.nn.Module:
    """Build a user's network with the stubs that mark where quantized data begins and ends."""
    ao = pytest.importorskip("torch.ao.quantization")
    nn = impl.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
            self.conv, self.bn, self.relu = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
            self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.bn(self.conv(self.quant(x)))).mean((2, 3))
            return self.dequant(self.head(x))

    return Net().eval()


def kinds(net: torch.nn.Module) -> dict[str, str]:
    """Name the class and its file of each layer."""
    return {
        name: f"{type(module).__module__}.{type(module).__name__}"
        for name, module in net.named_modules()
        if name
    }


def test_fuse_modules() -> None:
    """Fusing puts one layer for three in their place."""
    ao = pytest.importorskip("torch.ao.quantization")

    def scenario(impl: Implementation) -> tuple[dict[str, str], Tensor]:
        net, x = build(impl), torch.randn(2, 2, 6, 6)
        fused = ao.fuse_modules(net, [["conv", "bn", "relu"], ["head.0", "head.1"]])
        return kinds(fused), fused(x)

    found, _ = agree(scenario)

    assert found["conv"].endswith("intrinsic.modules.fused.ConvReLU2d")
    assert found["bn"] == "torch.nn.modules.linear.Identity"
    assert found["head.0"].endswith("intrinsic.modules.fused.LinearReLU")


def test_dynamic() -> None:
    """Dynamic quantization replaces every linear layer."""
    ao = pytest.importorskip("torch.ao.quantization")

    def scenario(impl: Implementation) -> tuple[dict[str, str], Tensor]:
        net, x = build(impl), torch.randn(2, 2, 6, 6)
        quantized = ao.quantize_dynamic(net, {impl.nn.Linear}, dtype=torch.qint8)
        return kinds(quantized), quantized(x)

    found, _ = agree(scenario)

    assert found["head.0"] == found["head.2"]
    assert found["head.0"].endswith("quantized.dynamic.modules.linear.Linear")


def test_static() -> None:
    """Static quantization observes every layer, then replaces it."""
    ao = pytest.importorskip("torch.ao.quantization")

    def scenario(impl: Implementation) -> tuple[dict[str, str], dict[str, str], Tensor]:
        net, x = build(impl), torch.randn(2, 2, 6, 6)
        net.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
        prepared = ao.prepare(ao.fuse_modules(net, [["conv", "bn", "relu"]]))
        prepared(x)
        quantized = ao.convert(prepared)
        return kinds(prepared), kinds(quantized), quantized(x)

    observed, quantized, _ = agree(scenario)

    assert "head.2.activation_post_process" in observed
    assert quantized["conv"].endswith("intrinsic.quantized.modules.conv_relu.ConvReLU2d")
    assert quantized["head.2"].endswith("quantized.modules.linear.Linear")


def test_quantization_aware_training() -> None:
    """Layers for quantization-aware training take the place of the float ones."""
    ao = pytest.importorskip("torch.ao.quantization")

    def scenario(impl: Implementation) -> tuple[dict[str, str], Tensor]:
        net, x = build(impl).train(), torch.randn(2, 2, 6, 6)
        net.qconfig = ao.get_default_qat_qconfig(torch.backends.quantized.engine)
        prepared = ao.prepare_qat(net)
        prepared(x).square().mean().backward()
        return kinds(prepared), prepared.head[0].weight.grad

    found, _ = agree(scenario)

    assert found["conv"].endswith("qat.modules.conv.Conv2d")
    assert found["head.0"].endswith("qat.modules.linear.Linear")
