import pytest
import torch

from tests.helpers import Implementation
from tests.integration.image_networks import image_net, images
from tests.integration.networks import agree


REASON = "needs torch-pruning: nox -s ecosystem installs it"


def test_dependency_graph() -> None:
    """To prune channels of a convolution is to prune what normalizes and what reads them."""
    tp = pytest.importorskip("torch_pruning", reason=REASON)

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        graph = tp.DependencyGraph().build_dependency(net, example_inputs=x)
        group = graph.get_pruning_group(net.conv, tp.prune_conv_out_channels, idxs=[0, 2, 5])
        group.prune()
        return str(group), net, net(x)

    _, net, _ = agree(scenario)

    assert (net.conv.out_channels, net.bn.num_features, net.body[0].in_channels) == (5, 5, 5)


def test_magnitude_pruner() -> None:
    """A pruner by magnitude halves the channels of every layer but the ignored ones."""
    tp = pytest.importorskip("torch_pruning", reason=REASON)

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
