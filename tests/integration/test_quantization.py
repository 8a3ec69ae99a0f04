import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.ao import quantization as ao
from torch.ao.quantization import quantize_fx

import modkit
import modkit.nn
from tests.helpers import Implementation, freeze, seed_everything


MODKITS: Final = "ignore:torch.ao.quantization finds layers by their exact class"
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


def sequences(nn: ModuleType) -> torch.nn.Module:
    """Build a classifier of sequences with recurrent layers, which are quantized dynamically."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(5, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
            self.cell = nn.GRUCell(6, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.gru(self.lstm(x)[0])[0]
            return self.head(self.cell(x[:, 0], x[:, 1]))

    seed_everything()
    return Sequences()


IMAGES: Final = torch.linspace(-1, 1, 2 * 2 * 6 * 6).reshape(2, 2, 6, 6)
SEQUENCES: Final = torch.linspace(-1, 1, 2 * 4 * 5).reshape(2, 4, 5)
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
    "dynamic_sequences": (sequences, dynamic, SEQUENCES),
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
def test_released_network(case: str) -> None:
    """A released network is quantized into the layers, weights and outputs of the torch network."""
    make, quantize, batch = CASES[case]
    expected = quantize(make(torch.nn))

    found = quantize(modkit.release(make(modkit.nn)))

    assert layers_of(found) == layers_of(expected)
    assert any(".quantized." in name for _, name in layers_of(found))
    assert freeze(found(batch)) == freeze(expected(batch))
    assert not torch.equal(found(batch), make(torch.nn).eval()(batch))
    assert found.state_dict().keys() == expected.state_dict().keys()


@every_case
def test_released_copy_leaves_the_network(case: str) -> None:
    """Quantizing a released copy changes neither the classes nor the weights of the original."""
    make, quantize, batch = CASES[case]
    net = make(modkit.nn).eval()
    classes, output = [type(module) for module in net.modules()], net(batch)

    quantize(modkit.release(copy.deepcopy(net)))

    assert [type(module) for module in net.modules()] == classes
    assert torch.equal(net(batch), output)


@every_case
def test_quantized_network_is_adopted(case: str) -> None:
    """A network with quantized layers can be adopted, computes the same, and is saved the same."""
    make, quantize, batch = CASES[case]
    net = quantize(modkit.release(make(modkit.nn)))
    output, state = net(batch), freeze(dict(net.state_dict()))

    with pytest.warns(UserWarning, match="GraphModule") if "fx" in case else nullcontext():
        modkit.adopt(net)

    assert torch.equal(net(batch), output)
    assert freeze(dict(net.state_dict())) == state


@every_case
def test_adopted_network_is_released(case: str) -> None:
    """A torch network that was adopted and released is quantized as if nothing had happened."""
    make, quantize, batch = CASES[case]
    expected = quantize(make(torch.nn))

    found = quantize(modkit.release(modkit.adopt(make(torch.nn))))

    assert layers_of(found) == layers_of(expected)
    assert torch.equal(found(batch), expected(batch))


@pytest.mark.filterwarnings(MODKITS)
@pytest.mark.filterwarnings(MODKITS)
@pytest.mark.parametrize("case", ["dynamic", "dynamic_sequences", "static_fx"])
def test_layers_are_quantized(case: str, impl: Implementation) -> None:
    """Quantization replaces the layers of a network."""
    make, quantize, _ = CASES[case]

    net = quantize(make(impl.nn))

    assert any(".quantized." in name for _, name in layers_of(net))


@pytest.mark.parametrize("case", ["static", "quantization_aware"])
def test_layers_are_fused(case: str, impl: Implementation) -> None:
    """Convolution, normalization and activation become one quantized layer."""
    make, quantize, _ = CASES[case]

    net = quantize(make(impl.nn))

    assert ".intrinsic.quantized." in type(net.conv).__module__


def test_weights_are_eight_bits() -> None:
    """The weights of a released network are stored in eight bits, within half a step of the old."""
    net = modkit.release(images(modkit.nn))
    before = net.head[0].weight.detach().clone()

    weight = ao.quantize_dynamic(net).head[0].weight()

    assert weight.dtype == torch.qint8
    assert (weight.dequantize() - before).abs().max() <= weight.q_scale() / 2 + 1e-6


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("dynamic", {"Linear"}),
        ("dynamic_sequences", {"Linear", "LSTM", "GRU", "GRUCell"}),
        ("static_fx", {"Linear", "Conv2d", "BatchNorm2d", "ReLU"}),
        ("quantization_aware_fx", {"Linear", "Conv2d", "BatchNorm2d", "ReLU"}),
    ],
)
def test_layers_that_are_passed_over_say_so(case: str, names: set[str]) -> None:
    """A network that is not released warns of each kind of layer that torch would have replaced."""
    make, quantize, _ = CASES[case]

    with pytest.warns(UserWarning, match=r"modkit.release\(") as caught:
        quantize(make(modkit.nn))

    told = [str(one.message) for one in caught if "modkit.release" in str(one.message)]
    assert names >= {text.split("modkit.nn.")[1].split()[0] for text in told} >= names - {"ReLU"}


def test_prepared_layers_that_are_passed_over_say_so() -> None:
    """``prepare`` warns of the layers that will not be observed, by the module that holds them."""
    net = images(modkit.nn).eval()
    net.head.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)

    with pytest.warns(UserWarning, match=r"modkit.nn.Linear") as caught:
        ao.prepare(net)

    assert not any("Conv2d" in str(one.message) for one in caught)


def test_users_set_qconfig_in_silence(impl: Implementation) -> None:
    """``qconfig`` of a layer is an attribute like any other: it is set, read, deleted and copied."""
    layer = impl.nn.Linear(2, 2)
    absent = hasattr(layer, "qconfig"), hasattr(impl.nn.Linear, "qconfig")
    layer.qconfig = "int8"
    kept = layer.qconfig, copy.deepcopy(layer).qconfig, "qconfig" in vars(layer)
    del layer.qconfig

    assert absent == (False, False)
    assert kept == ("int8", "int8", True)
    assert not hasattr(layer, "qconfig")
    with pytest.raises(AttributeError, match="qconfig"):
        del layer.qconfig


def test_subclasses_are_passed_over_in_silence(impl: Implementation) -> None:
    """A user's subclass of a layer is not quantized, which is no news and gives no warning."""

    class Own(impl.nn.Linear):
        pass

    net = ao.quantize_dynamic(torch.nn.Sequential(Own(2, 2)))

    assert type(net[0]) is Own
