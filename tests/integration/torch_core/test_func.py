from typing import Any

import torch
from torch import Tensor
from torch.func import (
    functional_call,
)

from tests.cases import for_each
from tests.helpers import Implementation, freeze, seed_everything
from tests.integration.networks import NETWORKS, agree, make_batch, make_net


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
