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


def test_overrides_are_called() -> None:
    """Torch's protected methods that users override run once per module, with torch's arguments."""

    def scenario(impl: Implementation) -> list[Any]:
        calls: list[Any] = []

        class Noting(impl.nn.Linear):
            def _apply(self, fn: Any, recurse: bool = True) -> Any:
                calls.append(("_apply", recurse))
                return super()._apply(fn, recurse)

            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
                calls.append(("_save_to_state_dict", prefix, keep_vars))
                super()._save_to_state_dict(destination, prefix, keep_vars)

            def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
                calls.append(("_load_from_state_dict", sorted(state_dict), prefix, args[0]))
                super()._load_from_state_dict(state_dict, prefix, *args)

            def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
                calls.append(("named_parameters", args, kwargs))
                return super().named_parameters(*args, **kwargs)

            def train(self, mode: bool = True) -> Any:
                calls.append(("train", mode))
                return super().train(mode)

            def requires_grad_(self, requires_grad: bool = True) -> Any:
                calls.append(("requires_grad_", requires_grad))
                return super().requires_grad_(requires_grad)

        net = impl.nn.Sequential(Noting(2, 2), impl.nn.Sequential(Noting(2, 2)))
        net.double().eval().requires_grad_(False)
        net.load_state_dict(net.state_dict())
        list(net.parameters())
        net.zero_grad()
        return calls

    calls = agree(scenario)

    assert [call for call in calls if call[0] == "_apply"] == [("_apply", True)] * 2
    assert [call for call in calls if call[0] == "train"] == [("train", False)] * 2
