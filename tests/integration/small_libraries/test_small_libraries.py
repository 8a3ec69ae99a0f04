"""Libraries that need a scenario or two each; the larger ones have folders of their own."""

import io
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Implementation
from tests.integration.image_networks import MULTIPLY_ADDS, image_net, images, scaled_net
from tests.integration.networks import agree


# The parameters of `image_net`: of its convolutions, its normalization and its head.
PARAMETERS = (8 * 27 + 8) + 16 + (4 * 72 + 4) + (3 * 16 + 3)


def needs(package: str, module: str = "") -> ModuleType:
    """Import a library, or a module of it, or skip the test."""
    reason = f"needs {package}: nox -s ecosystem installs it"
    library: ModuleType = pytest.importorskip(module or package, reason=reason)
    return library


# --- counters of operations -------------------------------------------------------------------------


def test_thop() -> None:
    """Thop counts every convolution and linear layer, and gives torch's counts for the others."""
    thop = needs("thop")

    operations, parameters = agree(
        lambda impl: thop.profile(image_net(impl.nn), (images(1),), verbose=False)
    )

    assert operations >= MULTIPLY_ADDS
    assert parameters == PARAMETERS


@pytest.mark.parametrize("backend", ["pytorch", "aten"])
def test_ptflops(backend: str) -> None:
    """Both backends of ptflops give torch's counts and print torch's table of layers."""
    ptflops = needs("ptflops")

    def scenario(impl: Implementation) -> object:
        table = io.StringIO()
        counts = ptflops.get_model_complexity_info(
            image_net(impl.nn), (3, 10, 10), as_strings=False, backend=backend, ost=table
        )
        return counts, table.getvalue()

    (operations, parameters), table = agree(scenario)

    assert operations >= MULTIPLY_ADDS
    assert parameters == PARAMETERS
    assert "head" in table


def test_counter_of_torch_pruning() -> None:
    """The counter of Torch-Pruning gives torch's counts for each layer."""
    utils = needs("torch-pruning", "torch_pruning.utils")

    def scenario(impl: Implementation) -> object:
        net = image_net(impl.nn)
        total, parameters, *by_layer = utils.count_ops_and_params(net, images(1), layer_wise=True)
        names = {module: name for name, module in net.named_modules()}
        layers = [{names[layer]: count for layer, count in row.items()} for row in by_layer]
        return total, parameters, layers

    total, parameters, (operations, _) = agree(scenario)

    assert total >= MULTIPLY_ADDS
    assert parameters == PARAMETERS
    assert operations["head"] >= 3 * 16


def test_fvcore() -> None:
    """Fvcore counts from a trace, by module and by operator."""
    fvcore = needs("fvcore", "fvcore.nn")

    def scenario(impl: Implementation) -> object:
        counts = fvcore.FlopCountAnalysis(image_net(impl.nn).eval(), images(1))
        table = fvcore.flop_count_table(counts)
        return counts.total(), dict(counts.by_module()), dict(counts.by_operator()), table

    total, by_module, _, table = agree(scenario)

    assert total >= MULTIPLY_ADDS
    assert by_module["head"] == 3 * 16
    assert "| body" in table


def test_torchinfo() -> None:
    """The summary has torch's text: names, shapes, parameters and multiply-adds."""
    torchinfo = needs("torchinfo")

    def scenario(impl: Implementation) -> object:
        columns = ("input_size", "output_size", "num_params", "kernel_size", "mult_adds")
        net = scaled_net(impl.nn)
        summary = torchinfo.summary(
            net, input_data=images(1), col_names=columns, row_settings=("var_names",), verbose=0
        )
        return str(summary), summary.total_mult_adds, summary.total_params, net

    text, operations, parameters, _ = agree(scenario)

    assert "Conv2d (conv)" in text
    assert operations >= MULTIPLY_ADDS
    assert parameters == PARAMETERS + 3


# --- libraries that change a network ----------------------------------------------------------------


def test_pruning_of_channels() -> None:
    """To prune channels of a convolution is to prune what normalizes and what reads them."""
    tp = needs("torch-pruning", "torch_pruning")

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        graph = tp.DependencyGraph().build_dependency(net, example_inputs=x)
        group = graph.get_pruning_group(net.conv, tp.prune_conv_out_channels, idxs=[0, 2, 5])
        group.prune()
        return str(group), net, net(x)

    _, net, _ = agree(scenario)

    assert (net.conv.out_channels, net.bn.num_features, net.body[0].in_channels) == (5, 5, 5)


def test_pruning_by_magnitude() -> None:
    """A pruner by magnitude halves the channels of every layer but the ignored ones."""
    tp = needs("torch-pruning", "torch_pruning")

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        importance = tp.importance.GroupMagnitudeImportance(p=2)
        pruner = tp.pruner.BasePruner(
            net, x, importance=importance, pruning_ratio=0.5, ignored_layers=[net.head]
        )
        pruner.step()
        return net, net(x)

    net, _ = agree(scenario)

    assert net.conv.out_channels == 4
    assert net.head.weight.shape == torch.Size([3, 8])


def test_quantization_by_brevitas() -> None:
    """Brevitas replaces each layer by its quantized one."""
    quantize = needs("brevitas", "brevitas.graph.quantize")

    def scenario(impl: Implementation) -> tuple[list[str], Tensor]:
        net = quantize.layerwise_quantize(image_net(impl.nn).eval())
        return [type(module).__name__ for module in net.modules()], net(images())

    kinds, _ = agree(scenario)

    assert kinds.count("QuantConv2d") == 2
    assert kinds.count("QuantLinear") == 1


def test_quantization_by_torchao() -> None:
    """Torchao swaps the weights of the linear layers, which keep their class."""
    quantization = needs("torchao", "torchao.quantization")

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
        weight = net.head.weight
        kept = type(net.head) is impl.nn.Linear
        return kept, type(weight).__name__, weight.dequantize(), repr(net), net(x)

    kept, kind, *_ = agree(scenario)

    assert kept
    assert kind == "Int8Tensor"


# --- derivatives ------------------------------------------------------------------------------------


def test_higher() -> None:
    """The inner loop trains a functional copy, and the outer gradient passes through it."""
    higher = needs("higher")

    def scenario(impl: Implementation) -> object:
        net, x = scaled_net(impl.nn).eval(), images()
        before = [p.detach().clone() for p in net.parameters()]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (copied, inner):
            for _ in range(2):
                inner.step(copied(x).square().mean())
            loss = copied(x).square().mean()
            loss.backward()
        kept = all(map(torch.equal, before, net.parameters()))
        return kept, loss, [p.grad for p in net.parameters()], list(copied.parameters())

    kept, _, gradients, _ = agree(scenario)

    assert kept
    assert all(gradient is not None for gradient in gradients)


def without_batches(impl: Implementation) -> Any:
    """Build a user's network without a layer that mixes samples."""
    nn = impl.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(1, 2, 3), nn.Sigmoid()
            self.flat, self.head = nn.Flatten(), nn.Linear(18, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.flat(self.act(self.conv(x))))

    return Net()


# BackPACK hooks the first layer too, whose input needs no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize(
    ("extension", "attribute"),
    [("DiagGGNExact", "diag_ggn_exact"), ("KFAC", "kfac"), ("BatchGrad", "grad_batch")],
)
def test_backpack(extension: str, attribute: str) -> None:
    """BackPACK finds its extension of each layer, and of the loss."""
    backpack = needs("backpack-for-pytorch", "backpack")
    extensions = needs("backpack-for-pytorch", "backpack.extensions")

    def scenario(impl: Implementation) -> object:
        net = backpack.extend(without_batches(impl), use_converter=True)
        loss = backpack.extend(impl.nn.CrossEntropyLoss())
        with backpack.backpack(getattr(extensions, extension)()):
            loss(net(torch.randn(4, 1, 5, 5)), torch.tensor([0, 2, 1, 1])).backward()
        return {name: getattr(p, attribute) for name, p in net.named_parameters()}

    results = agree(scenario)

    assert len(results) == 4
    assert all(len(result) > 0 for result in results.values())
