import io

import pytest

from tests.helpers import Implementation
from tests.integration.image_networks import MULTIPLY_ADDS, image_net, images
from tests.integration.networks import agree


def test_thop(impl: Implementation) -> None:
    """Thop counts every convolution and linear layer, and every parameter."""
    thop = pytest.importorskip("thop", reason="needs thop: nox -s ecosystem installs it")
    net = image_net(impl.nn)
    # Thop adds two buffers to each layer, none of them a parameter.
    parameters = sum(p.numel() for p in net.parameters())

    operations, counted = thop.profile(net, (images(1),), verbose=False)

    assert operations >= MULTIPLY_ADDS
    assert counted == parameters


def test_thop_gives_the_same_counts() -> None:
    """Thop gives torch's counts, those of normalization and pooling included."""
    thop = pytest.importorskip("thop", reason="needs thop: nox -s ecosystem installs it")

    def scenario(impl: Implementation) -> object:
        return thop.profile(image_net(impl.nn), (images(1),), verbose=False)

    assert agree(scenario)[0] >= MULTIPLY_ADDS


def test_ptflops(impl: Implementation) -> None:
    """Ptflops counts every convolution and linear layer with its hooks."""
    ptflops = pytest.importorskip("ptflops", reason="needs ptflops: nox -s ecosystem installs it")

    operations, parameters = ptflops.get_model_complexity_info(
        net := image_net(impl.nn),
        (3, 10, 10),
        as_strings=False,
        print_per_layer_stat=False,
        backend="pytorch",
    )

    assert operations >= MULTIPLY_ADDS
    assert parameters == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("backend", ["pytorch", "aten"])
def test_ptflops_gives_the_same_counts(backend: str) -> None:
    """Both backends of ptflops give torch's counts and print torch's table of layers."""
    ptflops = pytest.importorskip("ptflops", reason="needs ptflops: nox -s ecosystem installs it")

    def scenario(impl: Implementation) -> object:
        table = io.StringIO()
        counts = ptflops.get_model_complexity_info(
            image_net(impl.nn), (3, 10, 10), as_strings=False, backend=backend, ost=table
        )
        return counts, table.getvalue()

    counts, table = agree(scenario)

    assert counts[0] >= MULTIPLY_ADDS
    assert "head" in table


def test_torch_pruning(impl: Implementation) -> None:
    """The counter of Torch-Pruning counts every convolution and linear layer."""
    utils = pytest.importorskip(
        "torch_pruning.utils", reason="needs torch-pruning: nox -s ecosystem installs it"
    )
    net = image_net(impl.nn)

    operations, parameters = utils.count_ops_and_params(net, images(1))

    assert operations >= MULTIPLY_ADDS
    assert parameters == sum(p.numel() for p in net.parameters())


def test_torch_pruning_gives_the_same_counts() -> None:
    """The counter of Torch-Pruning gives torch's counts for each layer."""
    utils = pytest.importorskip(
        "torch_pruning.utils", reason="needs torch-pruning: nox -s ecosystem installs it"
    )

    def scenario(impl: Implementation) -> object:
        net = image_net(impl.nn)
        total, parameters, *by_layer = utils.count_ops_and_params(net, images(1), layer_wise=True)
        names = {module: name for name, module in net.named_modules()}
        layers = [{names[layer]: count for layer, count in row.items()} for row in by_layer]
        return total, parameters, layers

    total, _, (operations, _) = agree(scenario)

    assert total >= MULTIPLY_ADDS
    assert operations["head"] >= 3 * 16


def test_fvcore() -> None:
    """Fvcore counts from a trace, by module and by operator."""
    fvcore = pytest.importorskip("fvcore.nn", reason="needs fvcore: nox -s ecosystem installs it")

    def scenario(impl: Implementation) -> object:
        counts = fvcore.FlopCountAnalysis(image_net(impl.nn).eval(), images(1))
        table = fvcore.flop_count_table(counts)
        return counts.total(), dict(counts.by_module()), dict(counts.by_operator()), table

    total, by_module, _, table = agree(scenario)

    assert total >= MULTIPLY_ADDS
    assert by_module["head"] == 3 * 16
    assert "| body" in table
