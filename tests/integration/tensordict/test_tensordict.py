from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import agree


tensordict = pytest.importorskip(
    "tensordict", reason="needs tensordict: nox -s ecosystem installs it"
)

# The output of the network, and the names and types in its tables.
State = tuple[Tensor, list[list[tuple[str, str]]]]


def user_net(impl: Implementation) -> Any:
    """Return a module of a user with another one of a user and a layer below it."""

    class Scale(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = impl.nn.Parameter(torch.ones(2))
            self.register_buffer("offset", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x * self.weight + self.offset
            return out

    class Net(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = impl.nn.Linear(2, 2), Scale()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.scale(self.layer(x))
            return out

    return Net()


def state_of(net: Any) -> State:
    """Call the network, and describe what its modules hold."""
    tables = [
        [(name, type(value).__name__) for name, value in {**m._parameters, **m._buffers}.items()]
        for m in net.modules()
    ]
    return net(torch.ones(2)).detach(), tables


# The ways to use the values in a network.
USES: Final[dict[str, Callable[[Any, Any], object]]] = {
    "in place": lambda net, values: values.to_module(net, inplace=True),
    "tensors": lambda net, values: values.to_module(net, preserve_module_state=False),
    "parameters": lambda net, values: tensordict.TensorDictParams(values).to_module(net),
}


@for_each("use", USES)
def test_values_are_put_into_modules_of_the_user(use: str) -> None:
    """Values that are taken from a network and changed are put back by the path that torch's take."""

    def scenario(impl: Implementation) -> State:
        net = user_net(impl)
        values = tensordict.TensorDict.from_module(net).data.clone()
        USES[use](net, values.apply(lambda value: value + 1))
        return state_of(net)

    output, _ = agree(scenario)

    assert output.shape == (2,)


def test_values_hold_in_a_block() -> None:
    """Inside a block the network has the values, and after it its own."""

    def scenario(impl: Implementation) -> list[State]:
        net = user_net(impl)
        before = state_of(net)
        values = tensordict.TensorDict.from_module(net).data.clone()
        with values.apply(lambda value: value + 1).to_module(net):
            inside = state_of(net)
        return [before, inside, state_of(net)]

    before, inside, after = agree(scenario)

    assert not torch.equal(before[0], inside[0])
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


def test_values_are_batched_over_modules_of_the_user() -> None:
    """An ensemble is called with ``torch.vmap`` over the stacked values of its members."""

    def scenario(impl: Implementation) -> Tensor:
        nets = [user_net(impl) for _ in range(3)]
        stacked = tensordict.TensorDict.from_modules(*nets, as_module=True)

        def call(values: Any, x: Tensor) -> Tensor:
            with values.to_module(nets[0]):
                output: Tensor = nets[0](x)
            return output

        return torch.vmap(call, (0, None))(stacked, torch.ones(2)).detach()

    assert agree(scenario).shape == (3, 2)
