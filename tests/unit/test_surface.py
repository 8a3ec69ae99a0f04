import inspect

import torch

import modkit.nn
from tests.cases import for_each
from tests.helpers import Implementation


BASE, OURS = torch.nn.Module, modkit.nn.Module

PUBLIC = [name for name in dir(BASE) if not name.startswith("_")]
# Those that are not torch's own, which is inherited otherwise.
METHODS = [name for name, member in vars(OURS).items() if inspect.isfunction(member)]


def shape(function) -> list[tuple[str, object, object]]:
    """Describe a signature by names, kinds and defaults, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_no_public_name_is_missing_or_added() -> None:
    """The public names of the class are exactly those of ``torch.nn.Module``."""
    assert [name for name in dir(OURS) if not name.startswith("_")] == PUBLIC


@for_each("name", METHODS)
def test_signatures_are_equal(name: str) -> None:
    """Parameter names, kinds, order and defaults are torch's, annotations aside."""
    assert shape(getattr(OURS, name)) == shape(getattr(BASE, name))


@for_each("name", METHODS)
def test_methods_are_plain_functions(name: str) -> None:
    """A method is a function of the class: tools patch it, wrap it and compare it."""
    member = inspect.getattr_static(OURS, name)

    assert inspect.isfunction(member)
    assert member.__name__ == name


@for_each(
    "name", ["dump_patches", "call_super_init", "_version", "_compiled_call_impl", "T_destination"]
)
def test_class_attributes_have_torchs_values(name: str) -> None:
    """The class attributes that are settings have torch's defaults."""
    assert getattr(OURS, name) == getattr(BASE, name)


def test_use_adds_no_attributes(impl: Implementation) -> None:
    """Calling, walking, converting and saving a module leaves no cache in its ``__dict__``."""

    class Net(impl.Module):
        def forward(self, value):
            return value + 1

    module = Net()
    module.child = Net()
    keys = [*vars(module)]
    module(1)
    module.train().eval().float().requires_grad_(False).apply(lambda each: None)
    module.load_state_dict(module.state_dict())
    module.zero_grad()
    repr(module)
    list(module.named_parameters())
    module.register_forward_hook(lambda *_: None).remove()
    module(1)

    assert [*vars(module)] == keys
    assert [*vars(module.child)] == keys
