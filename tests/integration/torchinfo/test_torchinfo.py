import pytest

from tests.helpers import Implementation
from tests.integration.image_networks import MULTIPLY_ADDS, images, scaled_net
from tests.integration.networks import agree


def test_summary() -> None:
    """The summary has torch's text: names, shapes, parameters and multiply-adds."""
    torchinfo = pytest.importorskip(
        "torchinfo", reason="needs torchinfo: nox -s ecosystem installs it"
    )

    def scenario(impl: Implementation) -> object:
        columns = ("input_size", "output_size", "num_params", "kernel_size", "mult_adds")
        net = scaled_net(impl.nn)
        summary = torchinfo.summary(
            net, input_data=images(1), col_names=columns, row_settings=("var_names",), verbose=0
        )
        return str(summary), summary.total_mult_adds, summary.total_params, net

    text, operations, parameters, net = agree(scenario)

    assert "Conv2d (conv)" in text
    assert operations >= MULTIPLY_ADDS
    assert parameters == sum(p.numel() for p in net.parameters())
