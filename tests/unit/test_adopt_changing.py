import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import modkit
import modkit.nn
from tests.unit.adoptable import Block


def classes(model: nn.Module) -> list[type]:
    """Return the class of each module."""
    return [type(module) for module in model.modules()]


def test_a_lazy_layer_becomes_one_of_modkit() -> None:
    """Lazy layers, the user's own included, turn into adopted classes at their first call."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class LazyScale(nn.modules.lazy.LazyModuleMixin, Scale):
        cls_to_become = Scale

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.UninitializedParameter()

        def initialize_parameters(self, x: Tensor) -> None:
            self.weight.materialize(x.shape[-1:])
            nn.init.ones_(self.weight)

    net = modkit.adopt(nn.Sequential(nn.LazyLinear(3), LazyScale()))
    net(torch.ones(2, 4))
    adopted = classes(net)
    modkit.release(net)

    assert adopted[1] is modkit.nn.Linear
    assert issubclass(adopted[2], Scale)
    assert issubclass(adopted[2], modkit.nn.Module)
    assert not issubclass(adopted[2], LazyScale)
    assert classes(net) == [nn.Sequential, nn.Linear, Scale]


def test_parametrized_modules() -> None:
    """Parametrizations from before are kept, can be removed while adopted, and come back."""
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    before, x = classes(layer), torch.randn(2, 3)
    expected = layer(x)

    modkit.adopt(layer)
    adopted = layer(x)
    is_modkit = isinstance(layer, modkit.nn.Linear)
    modkit.release(layer)
    released, after = layer(x), classes(layer)
    parametrize.remove_parametrizations(modkit.adopt(layer), "weight")

    assert is_modkit
    assert torch.equal(adopted, expected)
    assert torch.equal(released, expected)
    assert after == before
    assert type(layer) is modkit.nn.Linear
    torch.testing.assert_close(layer(x), expected)


def test_parametrizing_while_adopted() -> None:
    """A parametrization that was added after adopt is kept by release."""
    layer = modkit.adopt(nn.Linear(3, 3))
    parametrizations.orthogonal(layer)
    x = torch.randn(2, 3)
    expected = layer(x)

    modkit.release(layer)
    released = layer(x)
    name, is_torch = type(layer).__name__, not isinstance(layer, modkit.nn.Module)
    parametrize.remove_parametrizations(layer, "weight")

    assert torch.equal(released, expected)
    assert (name, is_torch) == ("ParametrizedLinear", True)
    assert type(layer) is nn.Linear


def test_parametrized_user_classes() -> None:
    """A parametrized module of a user's class is adopted with its base, and released."""
    block = Block()
    parametrize.register_parametrization(block, "scale", nn.Softplus())
    parametrized, x = type(block), torch.randn(2, 4)
    expected = block(x)

    modkit.adopt(block)
    parametrize.register_parametrization(block, "offset", nn.Tanh())
    parametrize.remove_parametrizations(block, "offset", leave_parametrized=False)
    output = block(x)
    modkit.release(block)

    assert torch.equal(output, expected)
    assert type(block) is parametrized
    assert torch.equal(block(x), expected)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_hooks_that_compute_a_weight() -> None:
    """The hook of the old ``weight_norm`` goes on, and can be taken out while adopted."""
    layer = nn.utils.weight_norm(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    expected = layer(x)

    modkit.adopt(layer)
    output = layer(x)
    nn.utils.remove_weight_norm(layer)

    assert torch.equal(output, expected)
    torch.testing.assert_close(layer(x), expected)
