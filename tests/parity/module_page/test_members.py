import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import (
    BUFFERS,
    PARAMETERS,
    applying,
    nested,
    network,
    scaling,
    tensors,
)


ADDERS = pytest.mark.parametrize("method", ["add_module", "register_module"])


@ADDERS
def test_adding_a_child_module(impl: Implementation, method: str) -> None:
    """`add_module` and its alias add a child, which becomes an attribute; they return None."""
    parent, child = scaling(impl), scaling(impl)

    assert getattr(parent, method)("child", child) is None
    assert parent.child is child
    assert list(parent.named_children()) == [("child", child)]
    assert [name for name, _ in parent.named_parameters()] == ["factor", "child.factor"]


@ADDERS
def test_added_module_replaces_the_child_of_that_name(impl: Implementation, method: str) -> None:
    """Adding under the name of an existing child replaces it in its place."""
    parent = network(impl)
    child = scaling(impl)
    getattr(parent, method)("block", child)

    assert parent.block is child
    assert [name for name, _ in parent.named_children()] == ["block", "head"]


@ADDERS
@pytest.mark.parametrize(
    ("name", "error"),
    [
        (1, "TypeError"),
        (None, "TypeError"),
        ("", "KeyError"),
        ("a.b", "KeyError"),
        ("factor", "KeyError"),
        ("forward", "KeyError"),
    ],
)
def test_name_of_a_child_must_be_a_new_string(method: str, name: object, error: str) -> None:
    """The name is a non-empty str without dots that no other attribute has."""

    def scenario(impl: Implementation) -> object:
        return getattr(scaling(impl), method)(name, scaling(impl))

    assert same(scenario)[:2] == ("raised", error)


@ADDERS
@pytest.mark.parametrize("child", [1, "text", torch.ones(1), torch.nn.Module])
def test_child_must_be_a_module(method: str, child: object) -> None:
    """Anything but a module is a TypeError."""
    kind, error, text = same(lambda impl: getattr(impl.nn.Module(), method)("child", child))

    assert (kind, error) == ("raised", "TypeError")
    assert "is not a Module subclass" in text


def test_registering_a_parameter(impl: Implementation) -> None:
    """`register_parameter` adds a parameter, which becomes an attribute; it returns None."""
    module = network(impl)
    parameter = impl.nn.Parameter(torch.ones(2))

    assert module.register_parameter("extra", parameter) is None
    assert module.extra is parameter
    assert dict(module.named_parameters())["extra"] is parameter
    assert "extra" in module.state_dict()


@for_each(
    ("name", "error"),
    [
        (1, "TypeError"),
        (None, "TypeError"),
        ("", "KeyError"),
        ("a.b", "KeyError"),
        ("forward", "KeyError"),
    ],
)
@for_each("method", ["register_parameter", "register_buffer"])
def test_name_of_a_tensor_must_be_a_new_string(method: str, name: object, error: str) -> None:
    """The name of a parameter or buffer is a non-empty str without dots, and not taken."""

    def scenario(impl: Implementation) -> object:
        return getattr(scaling(impl), method)(name, impl.nn.Parameter(torch.ones(1)))

    assert same(scenario)[:2] == ("raised", error)


@for_each(
    ("method", "value", "error"),
    [
        ("register_parameter", 1, "TypeError"),
        ("register_parameter", torch.ones(1), "TypeError"),
        ("register_parameter", torch.nn.Module(), "TypeError"),
        ("register_buffer", 1, "TypeError"),
        ("register_buffer", [1.0], "TypeError"),
        ("register_buffer", torch.nn.Module(), "TypeError"),
    ],
)
def test_registered_value_must_be_of_its_kind(method: str, value: object, error: str) -> None:
    """A parameter is a Parameter or None, a buffer a Tensor or None."""

    def scenario(impl: Implementation) -> object:
        return getattr(impl.nn.Module(), method)("member", value)

    assert same(scenario)[:2] == ("raised", error)


EMPTY = pytest.mark.parametrize("method", ["register_parameter", "register_buffer"])


@EMPTY
@pytest.mark.parametrize("move", ["double", "to meta", "to_empty", "share_memory"])
def test_none_is_ignored_by_operations(impl: Implementation, method: str, move: str) -> None:
    """Operations that run on parameters or buffers skip a member registered as None."""
    operations = {
        "double": lambda module: module.double(),
        "to meta": lambda module: module.to("meta"),
        "to_empty": lambda module: module.to_empty(device="cpu"),
        "share_memory": lambda module: module.share_memory(),
    }
    module = scaling(impl)
    getattr(module, method)("empty", None)
    operations[move](module)

    assert module.empty is None
    assert list(tensors(module)) == [module.factor]


@EMPTY
def test_none_is_not_in_the_state_dict(impl: Implementation, method: str) -> None:
    """A parameter or buffer registered as None has no key in the state dict."""
    module = scaling(impl)
    getattr(module, method)("empty", None)

    assert list(module.state_dict()) == ["factor"]


def test_registering_a_buffer(impl: Implementation) -> None:
    """The example of `register_buffer` makes the tensor an attribute and part of the state."""

    class Norm(impl.nn.Module):
        def __init__(self, num_features):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(num_features))

    norm = Norm(3)

    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert list(norm.state_dict()) == ["running_mean"]


def test_registered_buffer_is_the_attribute(impl: Implementation) -> None:
    """`register_buffer` returns None, and the attribute is the registered tensor itself."""
    module = impl.nn.Module()
    tensor = torch.ones(2)

    assert module.register_buffer("kept", tensor) is None
    assert module.kept is tensor
    assert list(module.buffers()) == [tensor]


def test_buffer_is_not_a_parameter(impl: Implementation) -> None:
    """Buffers are state but not parameters, like BatchNorm's running_mean."""
    model = network(impl)

    assert "running_mean" not in dict(impl.nn.BatchNorm1d(3).named_parameters())
    assert "running_mean" in impl.nn.BatchNorm1d(3).state_dict()
    assert [name for name, _ in model.named_parameters()] == PARAMETERS
    assert [name for name, _ in model.named_buffers()] == BUFFERS


def test_buffers_are_persistent_by_default(impl: Implementation) -> None:
    """A buffer is saved with the parameters unless registered with persistent=False."""
    module = scaling(impl)
    module.register_buffer("default", torch.zeros(1))
    module.register_buffer("persistent", torch.zeros(1), persistent=True)
    module.register_buffer("transient", torch.zeros(1), persistent=False)

    assert list(module.state_dict()) == ["factor", "default", "persistent"]


def test_non_persistent_buffer_differs_in_the_state_dict_only(impl: Implementation) -> None:
    """A non-persistent buffer is listed, converted and accessed like a persistent one."""
    persistent, transient = impl.nn.Module(), impl.nn.Module()
    persistent.register_buffer("b", torch.ones(1))
    transient.register_buffer("b", torch.ones(1), persistent=False)
    for module in (persistent, transient):
        module.double()

        assert [name for name, _ in module.named_buffers()] == ["b"]
        assert module.get_buffer("b") is module.b
        assert module.b.dtype == torch.float64

    assert list(persistent.state_dict()) == ["b"]
    assert list(transient.state_dict()) == []


def test_diagram_of_get_submodule(impl: Implementation) -> None:
    """The network prints as the diagram shows it, up to torch's own two-space indentation."""
    diagram = """
    A(
        (net_b): Module(
            (net_c): Module(
                (conv): Conv2d(16, 33, kernel_size=(3, 3), stride=(2, 2))
            )
            (linear): Linear(in_features=100, out_features=200, bias=True)
        )
    )
    """

    assert repr(nested(impl)).split() == diagram.split()


def test_get_submodule_follows_the_path(impl: Implementation) -> None:
    """Dotted names lead to nested modules, parameters and buffers; the empty name to itself."""
    a = nested(impl)

    assert a.get_submodule("net_b.linear") is a.net_b.linear
    assert a.get_submodule("net_b.net_c.conv") is a.net_b.net_c.conv
    assert a.get_submodule("") is a
    assert a.get_parameter("net_b.linear.weight") is a.net_b.linear.weight

    a.net_b.register_buffer("b", torch.ones(1))

    assert a.get_buffer("net_b.b") is a.net_b.b


def test_get_submodule_agrees_with_named_modules(impl: Implementation) -> None:
    """`get_submodule` finds the same module as a search through `named_modules`."""
    model = network(impl)

    for name, module in model.named_modules():
        assert model.get_submodule(name) is module


def test_get_submodule_costs_as_much_as_the_target_is_deep(impl: Implementation) -> None:
    """The number of lookups depends on the target's depth, not on the tree's size."""
    lookups: list[str] = []

    class Counting(impl.nn.Module):
        def __getattr__(self, name):
            lookups.append(name)
            return super().__getattr__(name)

        def named_modules(self, *args, **kwargs):
            for name, module in super().named_modules(*args, **kwargs):
                lookups.append(name)
                yield name, module

    def cost(siblings: int, target: str) -> int:
        root = Counting()
        for module in (root, root_child := Counting()):
            for number in range(siblings):
                module.add_module(f"sibling{number}", Counting())
        root.child = root_child
        root.child.leaf = leaf = Counting()
        lookups.clear()

        assert root.get_submodule(target) is {"child": root_child, "child.leaf": leaf}[target]
        return len(lookups)

    assert cost(100, "child") == cost(1, "child")
    assert cost(100, "child.leaf") == cost(1, "child.leaf") == 2 * cost(1, "child")


def test_get_parameter_returns_a_parameter(impl: Implementation) -> None:
    """`get_parameter` returns the Parameter itself, for every name in the tree."""
    model = network(impl)

    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
        assert isinstance(parameter, torch.nn.Parameter)


def test_get_buffer_returns_a_buffer(impl: Implementation) -> None:
    """`get_buffer` returns the buffer itself, for every name in the tree."""
    model = network(impl)

    for name, buffer in model.named_buffers():
        assert model.get_buffer(name) is buffer


@for_each(
    ("method", "target"),
    [
        ("get_submodule", "net_b.missing"),
        ("get_submodule", "net_b.linear.weight"),
        ("get_submodule", "missing.linear"),
        ("get_submodule", "net_b.linear.in_features"),
        ("get_parameter", "net_b.linear.missing"),
        ("get_parameter", "net_b.linear"),
        ("get_parameter", "net_b.missing.weight"),
        ("get_parameter", "net_b.linear.in_features"),
        ("get_parameter", ""),
        ("get_buffer", "net_b.linear.weight"),
        ("get_buffer", "net_b.missing"),
        ("get_buffer", "missing.running_mean"),
        ("get_buffer", ""),
    ],
)
def test_wrong_targets_raise(method: str, target: str) -> None:
    """A target that does not exist, or is another kind of member, is torch's AttributeError."""
    assert same(lambda impl: getattr(nested(impl), method)(target))[:2] == (
        "raised",
        "AttributeError",
    )


@pytest.mark.parametrize("method", ["get_parameter", "get_buffer"])
def test_other_tensors_are_not_members(method: str) -> None:
    """A plain tensor attribute is neither a parameter nor a buffer."""

    def scenario(impl: Implementation) -> object:
        module = applying(impl, abs)
        module.plain = torch.ones(1)
        return getattr(module, method)("plain")

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "AttributeError")
    assert text.startswith("`plain` is not a")
