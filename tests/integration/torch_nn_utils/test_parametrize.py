import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import functional_call

from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything
from tests.integration.networks import agree, gradients, make_batch, make_net, train


def symmetric(nn: Any) -> torch.nn.Module:
    """Build a parametrization that keeps a square matrix symmetric."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

        def right_inverse(self, x: Tensor) -> Tensor:
            return x.triu()

    return Symmetric()


def parametrized(impl: Implementation) -> torch.nn.Module:
    """Build a network whose ``inner`` weight is symmetric."""
    net = make_net(impl.nn, "free")
    impl.nn.utils.parametrize.register_parametrization(net.inner, "weight", symmetric(impl.nn))
    return net


def test_register() -> None:
    """The parametrized weight is computed, trained and listed as in torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = parametrized(impl), make_batch("free")
        losses = train(net, batch)
        weight = net.inner.weight

        assert torch.equal(weight, weight.T)
        assert impl.nn.utils.parametrize.is_parametrized(net.inner, "weight")

        return losses, weight, gradients(net), dict(net.state_dict()), repr(net)

    _, _, _, state, text = agree(scenario)

    assert "inner.parametrizations.weight.original" in state
    assert "ParametrizedLinear" in text


@pytest.mark.parametrize("keep", [True, False])
def test_remove(impl: Implementation, keep: bool) -> None:
    """Removing gives the layer its class and one parameter back, computed or original."""
    net, batch = parametrized(impl), make_batch("free")
    original = net.inner.parametrizations.weight.original
    computed = net.inner.weight.detach().clone()
    result = impl.nn.utils.parametrize.remove_parametrizations(
        net.inner, "weight", leave_parametrized=keep
    )

    assert result is net.inner
    assert type(net.inner) is impl.nn.Linear
    assert net.inner.weight is original
    assert torch.equal(net.inner.weight, computed) is keep
    assert [name for name, _ in net.inner.named_parameters()] == ["bias", "weight"]
    assert net(batch).shape == (4, 3)


def test_assignment_goes_through_right_inverse(impl: Implementation) -> None:
    """Assigning the weight sets the original tensor, in place."""
    net = parametrized(impl)
    original = net.inner.parametrizations.weight.original
    net.inner.weight = torch.full((6, 6), 2.0)

    assert net.inner.parametrizations.weight.original is original
    assert torch.equal(original, torch.full((6, 6), 2.0).triu())
    assert torch.equal(net.inner.weight, torch.full((6, 6), 2.0))


def test_chain_and_cache(impl: Implementation) -> None:
    """Parametrizations are chained in order, and computed once inside ``cached``."""
    calls = []

    class Doubled(impl.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x * 2

    parametrize = impl.nn.utils.parametrize
    layer = impl.nn.Linear(6, 6)
    weight = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", symmetric(impl.nn))
    parametrize.register_parametrization(layer, "weight", Doubled())
    calls.clear()
    with parametrize.cached():
        layer(make_batch("free"))
        layer(make_batch("free"))

    assert len(calls) == 1
    assert torch.equal(layer.weight, 2 * (weight.triu() + weight.triu(1).T))


def test_several_originals_and_buffers() -> None:
    """A parametrization may split a weight into two tensors, and a buffer may be parametrized."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn = impl.nn

        class Rank(nn.Module):
            def forward(self, left: Tensor, right: Tensor) -> Tensor:
                return left @ right

            def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
                u, s, v = torch.linalg.svd(weight.detach().double(), full_matrices=False)
                return (u * s)[:, :2].float(), v[:2].float()

        class Shift(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + 1

        net, batch = make_net(nn, "free"), make_batch("free")
        nn.utils.parametrize.register_parametrization(net.inner, "weight", Rank(), unsafe=True)
        nn.utils.parametrize.register_parametrization(net, "scale", Shift())
        return train(net, batch), dict(net.state_dict()), dict(net.named_buffers())

    _, state, buffers = agree(scenario)

    assert state["inner.parametrizations.weight.original0"].shape == (6, 2)
    assert "parametrizations.scale.original" in buffers


@pytest.mark.parametrize(
    ("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=["to_modkit", "to_torch"]
)
def test_checkpoint_crosses(source: Implementation, target: Implementation) -> None:
    """The state dict of a parametrized network loads strictly into the other library's."""
    trained = parametrized(source)
    train(trained, make_batch("free"))
    fresh = parametrized(target)
    fresh.load_state_dict(trained.state_dict())

    assert freeze(fresh(make_batch("free"))) == freeze(trained(make_batch("free")))


def test_deepcopy_has_its_own_tensors(impl: Implementation) -> None:
    """A copy of a parametrized network is independent, and takes other weights for a call."""
    net, batch = parametrized(impl), make_batch("free")
    clone = copy.deepcopy(net)
    with torch.no_grad():
        clone.inner.parametrizations.weight.original.zero_()
    state = {"inner.parametrizations.weight.original": torch.eye(6)}
    called = functional_call(clone, state, (batch,))
    clone.inner.weight = torch.eye(6)
    clone.load_state_dict({**net.state_dict(), **clone.inner.state_dict(prefix="inner.")})

    assert not torch.equal(net.inner.weight, clone.inner.weight)
    assert torch.equal(called, clone(batch))


def test_pickling_whole_is_refused() -> None:
    """Pickling a parametrized layer gives torch's advice to use the state dict."""

    def scenario(impl: Implementation) -> str:
        with pytest.raises(RuntimeError) as caught:
            pickle.dumps(parametrized(impl).inner)
        return str(caught.value)

    assert "state_dict" in agree(scenario)


def test_transfer() -> None:
    """Parametrizations move from one layer to another, with the tensors."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn, parametrize = impl.nn, impl.nn.utils.parametrize
        source, target = nn.Linear(6, 6), nn.Linear(6, 6)
        parametrize.register_parametrization(source, "weight", symmetric(nn))
        parametrize.transfer_parametrizations_and_params(source, target)

        assert parametrize.type_before_parametrizations(target) is nn.Linear
        assert torch.equal(source.weight, target.weight)

        return dict(target.state_dict()), target(make_batch("free"))

    agree(scenario)


@pytest.mark.parametrize("name", ["matrix_exp", "cayley", "householder"])
def test_orthogonal(name: str) -> None:
    """Each way to keep a weight orthogonal trains as in torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        impl.nn.utils.parametrizations.orthogonal(net.inner, orthogonal_map=name)
        return train(net, batch), net.inner.weight, dict(net.state_dict())

    _, weight, _ = agree(scenario)

    torch.testing.assert_close(weight @ weight.T, torch.eye(6), atol=1e-5, rtol=0)


def test_new_spectral_norm() -> None:
    """The spectral parametrization normalises, updates its vectors when training, and leaves."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "conv"), make_batch("conv")
        layer = impl.nn.utils.parametrizations.spectral_norm(net.features[0])
        losses = train(net, batch)
        norm = torch.linalg.matrix_norm(layer.eval().weight.flatten(1), 2)
        state = dict(net.state_dict())
        impl.nn.utils.parametrize.remove_parametrizations(layer, "weight")

        assert type(layer) is impl.nn.Conv2d

        return losses, norm, state, dict(net.state_dict())

    _, norm, _, _ = agree(scenario)

    torch.testing.assert_close(norm, torch.tensor(1.0), atol=0.05, rtol=0)


def test_new_weight_norm() -> None:
    """The weight-norm parametrization trains, and loads the older function's checkpoints."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        old = copy.deepcopy(net)
        for block in net.blocks:
            impl.nn.utils.parametrizations.weight_norm(block.linear)
        losses = train(net, batch)
        with pytest.warns(FutureWarning, match="weight_norm"):
            impl.nn.utils.weight_norm(old.blocks[0].linear)
        net.blocks[0].linear.load_state_dict(old.blocks[0].linear.state_dict())
        return losses, dict(net.state_dict()), net(batch)

    _, state, _ = agree(scenario)

    assert "blocks.0.linear.parametrizations.weight.original1" in state


def test_parametrized_network_in_other_tools() -> None:
    """A parametrized network compiles, exports, traces and symbolically traces."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        seed_everything()
        net, batch = impl.nn.Sequential(impl.nn.Linear(6, 6), impl.nn.ReLU()), make_batch("free")
        impl.nn.utils.parametrize.register_parametrization(net[0], "weight", symmetric(impl.nn))
        torch._dynamo.reset()
        results = [
            torch.compile(net, backend="eager", fullgraph=True)(batch),
            torch.export.export(net, (batch,), strict=False).module()(batch),
            fx.symbolic_trace(net)(batch),
        ]
        calls = [n.target for n in fx.symbolic_trace(net).graph.nodes if n.op == "call_module"]
        torch._dynamo.reset()
        for result in results:
            torch.testing.assert_close(result, net(batch))
        return results, calls

    _, calls = agree(scenario)

    assert calls == ["0", "1"]
