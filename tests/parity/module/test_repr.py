import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, tree


EXTRA = ("", "one", "one\ntwo", "one\n\ntwo", "\n", "  spaced  ", "trailing\n", "(a): b", "ü\tx")


def node(impl: Implementation, extra: object, name: str = "Node") -> torch.nn.Module:
    """Build a module with the given extra representation."""
    kind = type(name, (impl.Module,), {"extra_repr": lambda self: extra})
    return kind()


@for_each("extra", EXTRA, ids=repr)
@for_each("children", [0, 1, 3])
def test_extra_repr(extra, children):
    """The extra text stands inline if it is one line and there are no children, else by lines."""

    def scenario(impl):
        module = node(impl, extra)
        for index in range(children):
            module.add_module(str(index), node(impl, EXTRA[index + 1]))
        outer = node(impl, "outer", "Outer")
        outer.inner = module
        return repr(module), str(module), f"{module}", repr(outer)

    assert same(scenario)[0] == "returned"


def test_a_module_without_anything() -> None:
    """An empty module is its class name with empty parentheses."""
    assert same(lambda impl: (repr(empty(impl)), repr(impl.Module()))) == (
        "returned",
        ("tuple", [("str", "'Empty()'"), ("str", "'Module()'")]),
    )


def test_a_tree():
    """Shared and ``None`` children are printed under each of their names."""

    def scenario(impl):
        module = tree(impl)
        module.left.inner.deeper = tree(impl)
        return repr(module)

    assert "'nothing'" not in str(same(scenario))
    assert "(nothing): None" in str(same(scenario))


@for_each("extra", [None, 3, ["a"], b"bytes"], ids=repr)
def test_an_extra_repr_of_another_type(extra):
    """An ``extra_repr`` that returns no string ends as in torch."""
    assert same(lambda impl: repr(node(impl, extra)))


def test_an_extra_repr_that_raises(impl: Implementation) -> None:
    """An error in ``extra_repr`` passes through."""

    class Broken(impl.Module):
        def extra_repr(self):
            raise ValueError("no text")

    module = impl.Module()
    module.child = Broken()
    with pytest.raises(ValueError, match="no text"):
        repr(module)

    assert type(module.child).__name__ == "Broken"


def test_overrides_of_repr_and_get_name():
    """A child's ``__repr__`` or ``__str__``, and an overridden ``_get_name``, are used."""

    def scenario(impl):
        class Own(impl.Module):
            def __repr__(self):
                return "first\n  second\n\nlast"

        class Str(impl.Module):
            def __str__(self):
                return "not used below"

        class Named(impl.Module):
            def _get_name(self):
                return "Renamed"

        module = Named()
        module.own, module.string, module.named = Own(), Str(), Named()
        module.own.child = child_leaf(impl)
        module.named.own = Own()
        return repr(module), str(module.string)

    assert same(scenario)[0] == "returned"


def test_an_instance_level_repr_is_ignored(impl: Implementation) -> None:
    """Python looks ``__repr__`` up on the class; one on the instance changes nothing."""
    module = impl.Module()
    module.child = child_leaf(impl)
    module.child.__repr__ = lambda: "instance"

    assert repr(module) == "Module(\n  (child): Child()\n)"


def test_instance_level_extra_repr_is_used(impl: Implementation) -> None:
    """``extra_repr`` on the instance replaces the method."""
    module = empty(impl)
    module.extra_repr = lambda: "of the instance"

    assert repr(module) == "Empty(of the instance)"


def test_odd_children():
    """Children that are not modules, or have odd names, are printed as in torch."""

    def scenario(impl):
        module = empty(impl)
        module._modules["text"] = "a\nb"
        module._modules["number"] = 3
        module._modules["a.b"] = empty(impl)
        module._modules[""] = None
        return repr(module)

    assert same(scenario)[0] == "returned"


def test_a_mixed_tree():
    """Torch layers and containers inside print as they do in a torch module."""

    def scenario(impl):
        module = empty(impl)
        module.layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
        module.layers.append(empty(impl))
        module.list = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(4)])
        module.dict = torch.nn.ModuleDict({"a": torch.nn.Dropout(), "b": empty(impl)})
        module.empty = torch.nn.ModuleList()
        return repr(module)

    assert same(scenario)[0] == "returned"
