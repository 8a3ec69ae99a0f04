import copy
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call

from tests.helpers import Implementation, seed_everything
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
