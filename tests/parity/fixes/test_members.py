from collections.abc import Iterator

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, clean_global_hooks
from tests.models import empty, leaf
from tests.parity.hooks.tools import returning
from tests.parity.module.contents import contents


@pytest.fixture(autouse=True)
def _clean_global_hooks() -> Iterator[None]:
    """Leave no global hook behind."""
    with clean_global_hooks():
        yield


KINDS = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(1)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(1)),
    "module": torch.nn.Identity,
}
METHODS = {
    "parameter": "register_parameter",
    "buffer": "register_buffer",
    "module": "add_module",
}


# Torch's own code runs the hooks of a buffer, and those of a module that is assigned.
WAYS = pytest.mark.parametrize(
    ("kind", "by_assignment"), [("parameter", False), ("parameter", True), ("module", False)]
)


@WAYS
@pytest.mark.parametrize("result", ["text", 3, [1], object], ids=str)
def test_what_a_registration_hook_returns_is_checked(
    impl: Implementation, kind: str, result: object, by_assignment: bool
) -> None:
    """A result that is no such member is a TypeError that names class, name and value."""
    module = leaf(impl)
    before = contents(module)
    getattr(impl, f"register_module_{kind}_registration_hook")(returning(result))
    value = KINDS[kind]()
    with pytest.raises(TypeError, match=r"'x' of Leaf .*registration hook returned") as caught:
        if by_assignment:
            module.x = value
        else:
            getattr(module, METHODS[kind])("x", value)

    assert repr(result)[:6] in str(caught.value)
    assert contents(module) == before


def test_a_refused_result_leaves_the_member_that_was_there(impl: Implementation) -> None:
    """The old parameter stays where a registration hook spoils the new one."""
    module = leaf(impl)
    weight = module.weight
    impl.register_module_parameter_registration_hook(returning("text"))
    with pytest.raises(TypeError, match="'weight' of Leaf"):
        module.weight = torch.nn.Parameter(torch.ones(1))

    assert module.weight is weight


def test_a_later_hook_may_repair_what_an_earlier_one_returned(impl: Implementation) -> None:
    """Only what all hooks together make of the value is checked."""
    module = empty(impl)
    repaired = torch.nn.Parameter(torch.ones(2))
    impl.register_module_parameter_registration_hook(returning("text"))
    impl.register_module_parameter_registration_hook(returning(repaired))
    module.x = torch.nn.Parameter(torch.ones(1))

    assert module.x is repaired


@for_each("name", ["training", "_parameters", "_forward_hooks"])
@for_each("kind", KINDS)
def test_reserved_names_cannot_be_registered(impl: Implementation, kind: str, name: str) -> None:
    """The methods refuse such names with the same error as an assignment."""
    module = leaf(impl)
    before = contents(module)
    with pytest.raises(KeyError, match=f"attribute '{name}' already exists"):
        getattr(module, METHODS[kind])(name, KINDS[kind]())

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
