"""Checkpoints of networks whose layers torch.nn.utils has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, freeze
from tests.integration.networks import agree, make_batch, make_net, train


pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"
)


def spectral_normed(impl: Implementation) -> torch.nn.Module:
    """Build a network whose first convolution has the older spectral norm."""
    net = make_net(impl.nn, "conv")
    impl.nn.utils.spectral_norm(net.features[0])
    return net


def changed(change: Callable[[Implementation, Any], object]) -> Callable[[Implementation], Any]:
    """Return a function that builds a network and changes its first convolution."""

    def build(impl: Implementation) -> Any:
        net = make_net(impl.nn, "conv")
        change(impl, net.features[0])
        return net

    return build


BUILD: dict[str, Callable[[Implementation], Any]] = {
    "weight_norm": changed(lambda impl, layer: impl.nn.utils.weight_norm(layer)),
    "spectral_norm": spectral_normed,
    "parametrized": changed(
        lambda impl, layer: impl.nn.utils.parametrizations.weight_norm(layer),
    ),
    "pruned": changed(
        lambda impl, layer: impl.submodule("nn.utils.prune").l1_unstructured(
            layer, "weight", amount=5
        )
    ),
}


@for_each(("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=["to_modkit", "to_torch"])
@for_each("build", BUILD.values(), ids=BUILD.keys())
def test_checkpoint_crosses(
    build: Callable[[Implementation], Any], source: Implementation, target: Implementation
) -> None:
    """The state dict loads strictly into the other library's network, with its metadata."""
    trained, fresh = build(source), build(target)
    train(trained, make_batch("conv"))
    fresh.load_state_dict(trained.state_dict())

    assert freeze(fresh.state_dict()._metadata) == freeze(trained.state_dict()._metadata)
    assert freeze(fresh.eval()(make_batch("conv"))) == freeze(trained.eval()(make_batch("conv")))


def test_spectral_norm_reads_its_first_version() -> None:
    """A checkpoint from before the vectors' second version is completed on loading."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        source, target = spectral_normed(impl), spectral_normed(impl)
        train(source, make_batch("conv"))
        state = source.state_dict()
        weight = source.features[0].weight.detach().clone()
        del state["features.0.weight_v"]
        state["features.0.weight"] = weight
        del state._metadata["features.0"]["spectral_norm"]
        target.load_state_dict(state)
        return dict(target.state_dict()), target.eval()(make_batch("conv"))

    state, _ = agree(scenario)

    assert "features.0.weight_v" in state
