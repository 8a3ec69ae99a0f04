import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import empty, leaf
from tests.parity.module.contents import contents


KINDS = {
    "register_parameter": lambda: torch.nn.Parameter(torch.ones(1)),
    "register_buffer": lambda: torch.nn.Buffer(torch.ones(1)),
    "add_module": torch.nn.Identity,
}


@for_each("name", ["training", "_parameters", "_forward_hooks"])
@for_each("method", KINDS)
def test_reserved_names_cannot_be_registered(impl: Implementation, method: str, name: str) -> None:
    """The methods refuse such names with the same error as an assignment."""
    module = leaf(impl)
    before = contents(module)
    with pytest.raises(KeyError, match=f"attribute '{name}' already exists"):
        getattr(module, method)(name, KINDS[method]())

    assert contents(module) == before


def test_the_modules_own_state_may_be_replaced(impl: Implementation) -> None:
    """Libraries assign whole registries and hook tables, and the mode."""
    module = leaf(impl)
    parameters = {"weight": module.weight}
    module._parameters, module._modules, module.training = parameters, {}, False

    assert module._parameters is parameters
    assert [name for name, _ in module.named_parameters()] == ["weight"]


@pytest.mark.parametrize("path", ["none", "plain"])
def test_strict_set_submodule_only_replaces_a_module(impl: Implementation, path: str) -> None:
    """With ``strict`` there has to be a module already, and None is not one."""
    module = empty(impl)
    module.add_module("none", None)
    module.plain = None
    before = contents(module)
    with pytest.raises(AttributeError, match=f"`{path}` is not an nn.Module"):
        module.set_submodule(path, leaf(impl), strict=True)

    assert contents(module) == before


@for_each("path", ["weight", "bias", "unset", "flag", "hidden"])
def test_set_submodule_does_not_take_the_place_of_something_else(
    impl: Implementation, path: str
) -> None:
    """A parameter or buffer, be it None, a value, and a None of the class stay in their place."""

    class Host(type(leaf(impl))):
        hidden = None

    module = Host()
    before = contents(module)
    with pytest.raises(AttributeError, match=f"`{path}` is not an nn.Module"):
        module.set_submodule(path, leaf(impl))

    assert contents(module) == before
