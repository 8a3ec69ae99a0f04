from typing import Final

import pytest
import torch

from tests.helpers import Implementation
from tests.integration.image_networks import image_net, images
from tests.integration.networks import agree


REASON: Final = "needs captum: nox -s ecosystem installs it"
# Captum warns that it puts hooks on the network, and that it makes the input a leaf with gradients.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting (forward, )?backward hooks"),
    pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients"),
]


def test_deep_lift() -> None:
    """DeepLift finds its rule for each nonlinearity, so the attributions add up."""
    attr = pytest.importorskip("captum.attr", reason=REASON)

    def scenario(impl: Implementation) -> tuple[torch.Tensor, torch.Tensor]:
        net, x = image_net(impl.nn).eval(), images()
        return attr.DeepLift(net).attribute(
            x, torch.zeros_like(x), target=1, return_convergence_delta=True
        )

    attributions, delta = agree(scenario)

    assert attributions.abs().sum() > 0.01
    torch.testing.assert_close(delta, torch.zeros(2), atol=1e-5, rtol=0)


def test_lrp() -> None:
    """Layer-wise relevance propagation finds a rule for each layer."""
    attr = pytest.importorskip("captum.attr", reason=REASON)

    def scenario(impl: Implementation) -> torch.Tensor:
        return attr.LRP(image_net(impl.nn).eval()).attribute(images(), target=1)

    assert agree(scenario).count_nonzero() > 0


@pytest.mark.parametrize("method", ["GuidedBackprop", "Deconvolution"])
def test_changed_relu(method: str) -> None:
    """Methods with another gradient for ReLU change the gradient of every ReLU in the network."""
    attr = pytest.importorskip("captum.attr", reason=REASON)

    def scenario(impl: Implementation) -> tuple[torch.Tensor, torch.Tensor]:
        net, x = image_net(impl.nn).eval(), images()
        plain = attr.Saliency(net).attribute(x, target=1, abs=False)
        return plain, getattr(attr, method)(net).attribute(x, target=1)

    plain, changed = agree(scenario)

    assert not torch.equal(plain, changed)


@pytest.mark.parametrize("method", ["Saliency", "IntegratedGradients", "InputXGradient"])
def test_gradients_of_the_input(method: str) -> None:
    """Attribution by gradients of the input works on a user's module."""
    attr = pytest.importorskip("captum.attr", reason=REASON)

    def scenario(impl: Implementation) -> torch.Tensor:
        return getattr(attr, method)(image_net(impl.nn).eval()).attribute(images(), target=1)

    assert agree(scenario).count_nonzero() > 0


@pytest.mark.parametrize("method", ["LayerGradCam", "LayerConductance", "LayerDeepLift"])
def test_layer(method: str) -> None:
    """Attribution to a layer reads the layer's output and gradient with hooks."""
    attr = pytest.importorskip("captum.attr", reason=REASON)

    def scenario(impl: Implementation) -> torch.Tensor:
        net = image_net(impl.nn).eval()
        return getattr(attr, method)(net, net.conv).attribute(images(), target=1)

    assert agree(scenario).count_nonzero() > 0


def test_jacobian_of_each_sample() -> None:
    """The helper of TracIn computes the gradient of each sample from hooks on the layers."""
    common = pytest.importorskip("captum.influence._utils.common", reason=REASON)

    def scenario(impl: Implementation) -> tuple[torch.Tensor, ...]:
        net, loss = image_net(impl.nn).eval(), impl.nn.CrossEntropyLoss(reduction="sum")
        return common._compute_jacobian_wrt_params_with_sample_wise_trick(
            net, (images(),), torch.tensor([0, 2]), loss, reduction_type="sum"
        )

    jacobians = agree(scenario)

    assert all(len(jacobian) == 2 for jacobian in jacobians)
    assert all(jacobian.count_nonzero() > 0 for jacobian in jacobians)
