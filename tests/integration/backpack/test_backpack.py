import pytest
import torch
from torch import Tensor

from tests.helpers import Implementation
from tests.integration.networks import agree


def build(impl: Implementation) -> torch.nn.Module:
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
def test_second_order(extension: str, attribute: str) -> None:
    """BackPACK finds its extension of each layer, and of the loss."""
    backpack = pytest.importorskip(
        "backpack", reason="needs backpack-for-pytorch: nox -s ecosystem installs it"
    )
    extensions = pytest.importorskip("backpack.extensions")

    def scenario(impl: Implementation) -> object:
        net = backpack.extend(build(impl), use_converter=True)
        loss = backpack.extend(impl.nn.CrossEntropyLoss())
        with backpack.backpack(getattr(extensions, extension)()):
            loss(net(torch.randn(4, 1, 5, 5)), torch.tensor([0, 2, 1, 1])).backward()
        return {name: getattr(p, attribute) for name, p in net.named_parameters()}

    results = agree(scenario)

    assert len(results) == 4
    assert all(len(result) > 0 for result in results.values())
