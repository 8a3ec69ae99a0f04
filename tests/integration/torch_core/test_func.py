import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn.utils import stateless

from tests.cases import for_each
from tests.helpers import Implementation, freeze, seed_everything
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net


def state_of(net: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Detach parameters and buffers from a network."""
    parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
    return parameters, {name: b.clone() for name, b in net.named_buffers()}


def tied_net(impl: Implementation) -> torch.nn.Module:
    """Build an encoder and a decoder that share one weight."""
    seed_everything()
    nn = impl.nn

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(6, 6, bias=False)
            self.decode = nn.Linear(6, 6, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.encode(x).relu())

    return Tied()


@for_each("network", NETWORKS)
def test_functional_call(network: str) -> None:
    """A call with other weights uses them and puts the module's own objects back."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        parameters, buffers = state_of(net)
        own = {name: id(p) for name, p in net.named_parameters()}
        halved = {name: p / 2 for name, p in parameters.items()}
        outputs = [functional_call(net, (w, buffers), (batch,)) for w in (parameters, halved)]

        assert {name: id(p) for name, p in net.named_parameters()} == own

        return outputs, buffers, dict(net.state_dict())

    outputs, _, state = agree(scenario)

    fresh = make_net(torch.nn, network)
    assert freeze(state) == freeze(dict(fresh.state_dict()))
    assert torch.equal(outputs[0], fresh(make_batch(network)))
    assert not torch.equal(outputs[0], outputs[1])


def test_functional_call_with_written_buffers() -> None:
    """Buffers that ``forward`` writes are taken from, and written to, the given dictionary."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        given = {"counter": torch.tensor(10), "running": torch.ones(6)}
        outputs = [functional_call(net, given, (batch,)) for _ in range(2)]
        return outputs, given, net.counter, net.running

    _, given, counter, running = agree(scenario)

    assert given["counter"] == 12
    assert not torch.equal(given["running"], torch.ones(6))
    assert counter == 0
    assert torch.equal(running, torch.zeros(6))


def test_functional_call_ties_weights() -> None:
    """One given weight stands for all names of a tied one, unless that is asked not to be."""

    def scenario(impl: Implementation) -> list[Tensor]:
        net, batch = tied_net(impl), make_batch("free")
        one = {"encode.weight": torch.eye(6)}
        return [
            functional_call(net, one, (batch,)),
            functional_call(net, one, (batch,), tie_weights=False),
            functional_call(
                net, {**one, "decode.weight": 2 * torch.eye(6)}, (batch,), tie_weights=False
            ),
        ]

    tied, untied, both = agree(scenario)

    assert torch.equal(tied, make_batch("free").relu())
    assert not torch.equal(tied, untied)
    assert torch.equal(both, 2 * tied)


@pytest.mark.parametrize(
    ("given", "strict", "text"),
    [
        ({"w": torch.zeros(6)}, True, "Missing key"),
        ({"w": torch.zeros(6), "nothing": torch.zeros(1)}, True, "Unexpected key"),
        ({"nothing.weight": torch.zeros(6)}, False, "nothing"),
    ],
)
def test_functional_call_with_wrong_names(
    impl: Implementation, given: dict[str, Tensor], strict: bool, text: str
) -> None:
    """Missing and unknown names are refused, and the module keeps its members."""
    net, batch = make_net(impl.nn, "free"), make_batch("free")
    weight = net.w
    with pytest.raises((RuntimeError, AttributeError), match=text):
        functional_call(net, given, (batch,), strict=strict)

    assert net.w is weight


def test_failing_call_puts_members_back(impl: Implementation) -> None:
    """When ``forward`` raises, the module has its own members again."""
    net = make_net(impl.nn, "free")
    before = dict(net.named_parameters())
    with pytest.raises(RuntimeError, match="size of tensor"):
        functional_call(net, state_of(net)[0], (torch.randn(4, 5),))

    assert all(after is before[name] for name, after in net.named_parameters())


def test_nested_prefixes_and_keyword_arguments() -> None:
    """State of a network that another one holds is given under its prefix, inputs by name."""

    def scenario(impl: Implementation) -> Tensor:
        nn = impl.nn

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.ModuleDict({"net": make_net(nn, "nested")})

            def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
                return self.body["net"](x) * scale

        inner = make_net(nn, "nested")
        state = {f"body.net.{name}": p * 0.5 for name, p in inner.named_parameters()}
        inner.load_state_dict({n.removeprefix("body.net."): p.detach() for n, p in state.items()})
        batch = make_batch("nested")
        result = functional_call(Outer(), state, (batch,), {"scale": 2.0}, strict=True)

        assert torch.equal(result, inner(batch) * 2.0)

        return result

    agree(scenario)


@pytest.mark.parametrize("network", ["nested", "transformer", "conv"])
def test_grad(network: str) -> None:
    """The functional gradient is that of ``backward``."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network).eval(), make_batch(network)
        parameters, buffers = state_of(net)

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(net, (weights, buffers), (batch,)).square().sum()

        return grad(loss)(parameters), vjp(loss, parameters)[0]

    functional, _ = agree(scenario)

    net = make_net(torch.nn, network).eval()
    net(make_batch(network)).square().sum().backward()
    torch.testing.assert_close(functional, gradients(net))


def test_per_sample_gradients() -> None:
    """``vmap`` of ``grad`` gives one gradient a sample; their sum is the batch's gradient."""

    def scenario(impl: Implementation) -> dict[str, Tensor]:
        net, batch = make_net(impl.nn, "conv").eval(), make_batch("conv")
        parameters, buffers = state_of(net)

        def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(net, (weights, buffers), (sample[None],)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, batch)

    samples = agree(scenario)

    net = make_net(torch.nn, "conv").eval()
    net(make_batch("conv")).square().sum().backward()
    torch.testing.assert_close({k: v.sum(0) for k, v in samples.items()}, gradients(net))


# torch registers its forward-mode formulas through TorchScript on first use.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_jacobians() -> None:
    """Reverse and forward Jacobians, Hessian and directional derivative equal torch's."""

    def scenario(impl: Implementation) -> list[Any]:
        net, x = make_net(impl.nn, "nested").double(), make_batch("nested")[0].double()
        for parameter in net.parameters():
            parameter.requires_grad_(False)

        def function(v: Tensor) -> Tensor:
            return net(v[None])[0]

        return [
            jacrev(function)(x),
            jacfwd(function)(x),
            hessian(lambda v: function(v).sum())(x),
            jvp(function, (x,), (torch.ones_like(x),))[1],
        ]

    reverse, forward, _, direction = agree(scenario)

    torch.testing.assert_close(reverse, forward)
    torch.testing.assert_close(reverse.sum(1), direction)


def test_ensemble() -> None:
    """Several networks stacked into one state run under ``vmap`` like one after the other."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net = make_net(impl.nn, "nested")
        nets = [net, copy.deepcopy(net), copy.deepcopy(net)]
        for factor, net in enumerate(nets):
            with torch.no_grad():
                net.heads["left"].bias.add_(factor)
        parameters, buffers = stack_module_state(nets)
        skeleton = copy.deepcopy(nets[0]).to("meta")
        batch = make_batch("nested")
        together = vmap(lambda p, b: functional_call(skeleton, (p, b), (batch,)))(
            parameters, buffers
        )
        together.sum().backward()

        torch.testing.assert_close(together, torch.stack([net(batch) for net in nets]))

        return together, {name: p.grad for name, p in parameters.items()}

    together, grads = agree(scenario)

    assert together.shape == (3, 4, 3)
    assert grads["heads.left.bias"].shape == (3, 3)


def test_ensemble_refuses_mixed_modes(impl: Implementation) -> None:
    """Stacking networks of which some are in evaluation mode is refused, as is mixing classes."""
    left, right = impl.nn.Linear(2, 2), impl.nn.Linear(2, 2).eval()

    with pytest.raises(RuntimeError, match="training/eval mode"):
        stack_module_state([left, right])
    with pytest.raises(RuntimeError, match="the same class"):
        stack_module_state([left, impl.nn.Identity()])


def test_batch_norm_under_vmap(impl: Implementation) -> None:
    """Torch's helper that takes the running statistics out works on modkit's BatchNorm."""
    net = make_net(impl.nn, "conv")
    torch.func.replace_all_batch_norm_modules_(net)
    parameters, buffers = state_of(net)
    images = torch.stack([make_batch("conv"), make_batch("conv") * 2])
    result = vmap(lambda x: functional_call(net, (parameters, buffers), (x,)))(images)

    assert net.features[1].running_mean is None
    torch.testing.assert_close(result[1], net(images[1]))


def test_randomness_under_vmap() -> None:
    """Dropout under ``vmap`` draws the numbers that torch's does."""

    def scenario(impl: Implementation) -> Tensor:
        net = impl.nn.Sequential(impl.nn.Dropout(0.5), impl.nn.Linear(6, 3))
        seed_everything()
        return vmap(net, randomness="different")(make_batch("free"))

    agree(scenario)


def test_deprecated_stateless_call(impl: Implementation) -> None:
    """The older ``stateless.functional_call`` warns and still works."""
    net, batch = make_net(impl.nn, "nested"), make_batch("nested")
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    with pytest.warns(FutureWarning, match="functional_call"):
        result = stateless.functional_call(net, zeros, (batch,))

    assert torch.equal(result, batch[:, :3])


def test_swapped_state_lasts_for_the_block(impl: Implementation) -> None:
    """Inside torch's reparametrising block the given tensors are the module's members."""
    net = make_net(impl.nn, "free")
    replacement = torch.full((6,), 3.0)
    original = net.w
    with stateless._reparametrize_module(net, {"w": replacement}):
        inside = net.w
        registered = net._parameters["w"]

    assert inside is replacement
    assert registered is replacement
    assert net.w is original
