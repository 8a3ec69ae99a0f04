from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net


class Sharded:
    """Mixin that a sharding library adds to the class of a module."""

    def unshard(self) -> str:
        """Tell which class was taken over."""
        return type(self).__mro__[2].__name__


def take_over(module: torch.nn.Module) -> None:
    """Give a module a class made on the spot, with all that its own class has."""
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (Sharded, cls), {})


@for_each("network", NETWORKS)
def test_class_is_swapped(network: str) -> None:
    """Every module of a network takes a dynamic subclass, works, and takes its class back."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        classes = [type(module) for module in net.modules()]
        for module in net.modules():
            take_over(module)
        output = net(batch)
        output.sum().backward()
        names = [type(module).__name__ for module in net.modules()]
        for module, cls in zip(net.modules(), classes, strict=True):
            assert module.unshard() == cls.__name__
            assert isinstance(module, cls)

            module.__class__ = cls
        return output, gradients(net), names, dict(net.state_dict()), net(batch)

    _, _, names, _, _ = agree(scenario)

    assert names[0].startswith("Sharded")


def test_layer_initialised_as_a_module_only(impl: Implementation) -> None:
    """A layer subclass may skip the layer's own initialiser, as adapters do."""
    nn = impl.nn

    class Adapter(nn.Linear):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = 2, 3
            self.weight = nn.Parameter(torch.ones(3, 2))
            self.register_parameter("bias", None)

    output = Adapter()(torch.ones(1, 2))

    assert torch.equal(output, torch.full((1, 3), 2.0))
    assert repr(Adapter()) == "Adapter(in_features=2, out_features=3, bias=False)"
