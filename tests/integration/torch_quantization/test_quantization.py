from collections.abc import Callable
from types import ModuleType
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.ao import quantization as ao
from torch.ao.quantization import quantize_fx

import modkit.nn
from tests.helpers import freeze, seed_everything


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:.*reduce_range will be deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel"),
    pytest.mark.skipif(
        torch.backends.quantized.engine == "none", reason="torch has no quantized kernels here"
    ),
]


def images(nn: ModuleType) -> torch.nn.Module:
    """Build a classifier of images, with the stubs that mark where quantized data begins."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
            self.conv, self.bn, self.relu = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
            self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.bn(self.conv(self.quant(x)))).mean((2, 3))
            return self.dequant(self.head(x))

    seed_everything()
    return Images()


IMAGES: Final = torch.linspace(-1, 1, 2 * 2 * 6 * 6).reshape(2, 2, 6, 6)
TO_FUSE: Final = [["conv", "bn", "relu"], ["head.0", "head.1"]]


def dynamic(net: torch.nn.Module) -> torch.nn.Module:
    """Quantize weights now, and activations on the fly."""
    return ao.quantize_dynamic(net)


def static(net: torch.nn.Module) -> torch.nn.Module:
    """Fuse, calibrate with one batch, and convert."""
    net = ao.fuse_modules(net.eval(), TO_FUSE)
    net.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    prepared = ao.prepare(net)
    prepared(IMAGES)
    return ao.convert(prepared)


def aware(net: torch.nn.Module) -> torch.nn.Module:
    """Fuse, train one step with simulated quantization, and convert."""
    net = ao.fuse_modules_qat(net.train(), TO_FUSE)
    net.qconfig = ao.get_default_qat_qconfig(torch.backends.quantized.engine)
    prepared = ao.prepare_qat(net)
    train_one_step(prepared)
    return ao.convert(prepared.eval())


def static_fx(net: torch.nn.Module) -> torch.nn.Module:
    """Do what ``static`` does on the graph of the network."""
    prepared = quantize_fx.prepare_fx(net.eval(), ao.get_default_qconfig_mapping(), (IMAGES,))
    prepared(IMAGES)
    return quantize_fx.convert_fx(prepared)


def aware_fx(net: torch.nn.Module) -> torch.nn.Module:
    """Do what ``aware`` does on the graph of the network."""
    config = ao.get_default_qat_qconfig_mapping()
    prepared = quantize_fx.prepare_qat_fx(net.train(), config, (IMAGES,))
    train_one_step(prepared)
    return quantize_fx.convert_fx(prepared.eval())


def train_one_step(net: torch.nn.Module) -> None:
    """Move the weights, so that what was trained can be told from what was not."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(IMAGES).square().sum().backward()
    optimizer.step()


Quantize = Callable[[torch.nn.Module], torch.nn.Module]
CASES: Final[dict[str, tuple[Callable[[ModuleType], torch.nn.Module], Quantize, Tensor]]] = {
    "dynamic": (images, dynamic, IMAGES),
    "static": (images, static, IMAGES),
    "quantization_aware": (images, aware, IMAGES),
    "static_fx": (images, static_fx, IMAGES),
    "quantization_aware_fx": (images, aware_fx, IMAGES),
}
every_case = pytest.mark.parametrize("case", CASES)


def layers_of(net: torch.nn.Module) -> list[tuple[str, str]]:
    """List the paths of the layers below a network, with the full names of their classes."""
    return [
        (path, f"{type(module).__module__}.{type(module).__qualname__}")
        for path, module in net.named_modules()
        if path and not isinstance(module, torch.fx.GraphModule)
    ]


@every_case
def test_a_network_is_quantized_as_in_torch(case: str) -> None:
    """A user's network gets the quantized layers, weights and outputs of the torch network."""
    make, quantize, batch = CASES[case]
    expected = quantize(make(torch.nn))

    found = quantize(make(modkit.nn))

    assert layers_of(found) == layers_of(expected)
    assert any(".quantized." in name for _, name in layers_of(found))
    assert freeze(found(batch)) == freeze(expected(batch))
    assert not torch.equal(found(batch), make(torch.nn).eval()(batch))
    assert found.state_dict().keys() == expected.state_dict().keys()
