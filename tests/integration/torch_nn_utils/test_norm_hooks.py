import copy
from typing import Any

import pytest
import torch

from tests.helpers import MODKIT, TORCH, Implementation, freeze
from tests.integration.networks import agree, gradients, make_batch, make_net, train


pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"
)
crossings = pytest.mark.parametrize(
    ("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=["to_modkit", "to_torch"]
)


def weight_normed(impl: Implementation) -> torch.nn.Module:
    """Build a network whose first convolution has the older weight norm."""
    net = make_net(impl.nn, "conv")
    impl.nn.utils.weight_norm(net.features[0])
    return net


def spectral_normed(impl: Implementation) -> torch.nn.Module:
    """Build a network whose first convolution has the older spectral norm."""
    net = make_net(impl.nn, "conv")
    impl.nn.utils.spectral_norm(net.features[0])
    return net


def test_weight_norm() -> None:
    """The hook recomputes the weight before each call, and training follows torch's."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = weight_normed(impl), make_batch("conv")
        losses = train(net, batch)
        return losses, gradients(net), dict(net.state_dict()), net.features[0].weight

    _, grads, _, _ = agree(scenario)

    assert {"features.0.weight_g", "features.0.weight_v"} <= grads.keys()


def test_weight_norm_is_removed() -> None:
    """Removing leaves a plain parameter of the same value and no hook."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = weight_normed(impl), make_batch("conv")
        train(net, batch)
        before = net.eval()(batch)
        layer = impl.nn.utils.remove_weight_norm(net.features[0])

        assert not layer._forward_pre_hooks
        assert isinstance(layer.weight, torch.nn.Parameter)
        torch.testing.assert_close(net(batch), before)

        return net(batch), dict(net.state_dict())

    _, state = agree(scenario)

    assert "features.0.weight_g" not in state


def test_weight_norm_twice_and_missing() -> None:
    """Registering twice and removing what is not there raise torch's errors."""

    def scenario(impl: Implementation) -> list[str]:
        layer = impl.nn.Linear(3, 3)
        texts = []
        with pytest.raises(ValueError) as caught:
            impl.nn.utils.remove_weight_norm(layer)
        texts.append(str(caught.value).replace("modkit", "torch"))
        impl.nn.utils.weight_norm(layer)
        with pytest.raises(RuntimeError) as refused:
            impl.nn.utils.weight_norm(layer)
        texts.append(str(refused.value))
        return texts

    assert "Cannot register two weight_norm hooks" in agree(scenario)[1]


def test_spectral_norm() -> None:
    """The power iteration runs in training only, and its vectors are in the checkpoint."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = spectral_normed(impl), make_batch("conv")
        losses = train(net, batch)
        state = copy.deepcopy(dict(net.state_dict()))
        net.eval()(batch)
        return losses, state, freeze(dict(net.state_dict())) == freeze(state), net(batch)

    _, state, unchanged, _ = agree(scenario)

    assert {"features.0.weight_orig", "features.0.weight_u", "features.0.weight_v"} <= state.keys()
    assert unchanged


def test_spectral_norm_is_removed() -> None:
    """Removing leaves the normalised weight, no hook, and a state dict without its vectors."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = spectral_normed(impl), make_batch("conv")
        train(net, batch)
        before = net.eval()(batch)
        layer = impl.nn.utils.remove_spectral_norm(net.features[0])

        assert not layer._forward_pre_hooks
        assert not layer._state_dict_hooks
        torch.testing.assert_close(net(batch), before)

        return net(batch), dict(net.state_dict())

    _, state = agree(scenario)

    assert "features.0.weight_u" not in state


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


@crossings
@pytest.mark.parametrize("build", [weight_normed, spectral_normed])
def test_checkpoint_crosses(build: Any, source: Implementation, target: Implementation) -> None:
    """The state dict loads strictly into the other library's network, with its metadata."""
    trained, fresh = build(source), build(target)
    train(trained, make_batch("conv"))
    fresh.load_state_dict(trained.state_dict())

    assert freeze(fresh.state_dict()._metadata) == freeze(trained.state_dict()._metadata)
    assert freeze(fresh.eval()(make_batch("conv"))) == freeze(trained.eval()(make_batch("conv")))


def test_recurrent_weight_norm() -> None:
    """The weights of an LSTM can be normalised by name."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "lstm"), make_batch("lstm")
        impl.nn.utils.weight_norm(net.lstm, "weight_hh_l0")
        return train(net, batch), dict(net.state_dict())

    _, state = agree(scenario)

    assert "lstm.weight_hh_l0_g" in state
