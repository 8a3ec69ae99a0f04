import gc
import weakref

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, leaf, tree
from tests.parity.module.contents import run


def result(action):
    """Return what the action returns, or the type and text of what it raises."""
    try:
        return action()
    except (AttributeError, ValueError) as error:
        return (type(error).__name__, str(error))


@for_each("name", ["missing", "_missing", "__missing__", "0", "a.b", ""])
def test_a_missing_attribute_names_the_class(name):
    """Reading an unknown name raises AttributeError with the class and the name."""
    assert same(lambda impl: getattr(leaf(impl), name))[0] == "raised"


def test_getattr_can_be_called_directly():
    """``__getattr__`` finds members, but not plain attributes, methods or class attributes."""

    def scenario(impl):
        module = tree(impl)
        names = ("gain", "left", "nothing", "label", "training", "forward", "missing")
        return [(name, result(lambda name=name: type(module.__getattr__(name)))) for name in names]

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("lost", ["_parameters", "_buffers", "_modules"])
def test_lookup_survives_a_lost_registry(impl: Implementation, lost: str) -> None:
    """Members of the other registries are found when one registry does not exist."""
    module = tree(impl).right
    module.child = child_leaf(impl)
    del vars(module)[lost]
    left = {"_parameters": "weight", "_buffers": "mean", "_modules": "child"}
    del left[lost]

    assert all(hasattr(module, name) for name in left.values())
    assert not hasattr(module, "missing")


def test_hasattr_for_every_kind(impl: Implementation) -> None:
    """Every registered name is an attribute, ``None`` slots included."""
    module = tree(impl)

    assert all(hasattr(module, name) for name in ("gain", "left", "nothing", "label", "training"))
    assert all(hasattr(module.right, name) for name in ("weight", "bias", "scratch", "unset"))
    assert module.nothing is None
    assert module.right.bias is None
    assert not hasattr(module, "missing")


@pytest.mark.parametrize("order", [("_parameters", "_buffers"), ("_buffers", "_modules")])
def test_the_precedence_of_registries(impl: Implementation, order) -> None:
    """A name in several registries is the parameter, else the buffer, else the module."""
    module = empty(impl)
    values = [torch.nn.Parameter(torch.ones(1)), torch.zeros(1)]
    for registry, value in zip(order, values, strict=True):
        vars(module)[registry]["x"] = value

    assert module.x is values[0]


def test_the_instance_dict_and_the_class_come_first(impl: Implementation) -> None:
    """An attribute that Python finds without ``__getattr__`` hides a member of that name."""

    class Host(impl.Module):
        constant = "of the class"

    module = Host()
    module._parameters["constant"] = torch.nn.Parameter(torch.ones(1))
    module._buffers["plain"] = torch.ones(1)
    vars(module)["plain"] = "of the instance"

    assert module.constant == "of the class"
    assert module.plain == "of the instance"


def test_a_class_attribute_hides_a_child(impl: Implementation) -> None:
    """A child under the name of a class attribute or method is registered, but not read."""

    class Host(impl.Module):
        head = None

        def body(self):
            return 1

    module = Host()
    module.head, module.body = child_leaf(impl), child_leaf(impl)

    assert module.head is None
    assert module.body() == 1
    assert [name for name, _ in module.named_children()] == ["head", "body"]


def test_properties_that_raise():
    """An AttributeError in a property is reported for the property; other errors pass through."""

    class Broken:
        @property
        def lookup(self):
            return self.no_such_thing

        @property
        def foreign(self):
            return torch.zeros(1).nope

        @property
        def value(self):
            raise ValueError("of the property")

    def scenario(impl):
        class Host(Broken, impl.Module):
            pass

        names = ("lookup", "foreign", "value")
        has = [result(lambda name=name: hasattr(Host(), name)) for name in names]
        return has, [result(lambda name=name: getattr(Host(), name)) for name in names]

    assert same(scenario)[0] == "returned"


def test_a_property_setter_gets_plain_values_but_not_members(impl: Implementation) -> None:
    """A setter runs for ordinary values; modules are registered past it."""

    class Host(impl.Module):
        @property
        def x(self):
            return 5

        @x.setter
        def x(self, value):
            vars(self)["received"] = value

    module = Host()
    for value in (3, "text", None, [1], torch.ones(1)):
        module.x = value
        assert vars(module)["received"] is value
    del vars(module)["received"]
    module.x = child_leaf(impl)

    assert "received" not in vars(module)
    assert list(module._modules) == ["x"]


def test_data_descriptors_of_the_class_work(impl: Implementation) -> None:
    """``__set__`` and ``__delete__`` of a descriptor are called for plain values."""
    log = []

    class Logged:
        def __get__(self, instance, owner):
            return "got"

        def __set__(self, instance, value):
            log.append(("set", value))

        def __delete__(self, instance):
            log.append(("delete",))

    class Host(impl.Module):
        x = Logged()

    module = Host()
    module.x = 3
    del module.x

    assert log == [("set", 3), ("delete",)]
    assert module.x == "got"


def test_dir_lists_members_and_leaves_out_numbers():
    """``dir`` is sorted, holds members of all kinds, and no name that starts with a digit."""

    def scenario(impl):
        module = tree(impl)
        module.add_module("0", child_leaf(impl))
        module.register_buffer("1b", torch.ones(1))
        vars(module)["a b"] = 1
        return [name for name in dir(module) if not name.startswith("__")]

    names = same(scenario)[1][1]
    assert ("str", "'gain'") in names
    assert ("str", "'a b'") in names
    assert ("str", "'0'") not in names


def test_dir_of_a_module_with_an_empty_name():
    """A member with the empty name makes ``dir`` fail as in torch."""

    def scenario(impl):
        module = empty(impl)
        vars(module)[""] = 1
        return dir(module)

    assert same(scenario)[0] == "raised"


def test_an_override_of_getattr_may_defer(impl: Implementation) -> None:
    """A wrapper's ``__getattr__`` that calls ``super()`` first sees AttributeError on a miss."""

    class Wrapper(impl.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    inner = leaf(impl)
    wrapper = Wrapper(inner)

    assert wrapper.inner is inner
    assert wrapper.weight is inner.weight
    assert wrapper.flag == 3
    assert not hasattr(wrapper, "missing")


def test_an_override_of_setattr_sees_every_assignment(impl: Implementation) -> None:
    """A subclass's ``__setattr__`` is called for members and for ``training``, not by ``__init__``."""
    log = []

    class Logged(impl.Module):
        def __setattr__(self, name, value):
            log.append(name)
            super().__setattr__(name, value)

    module = Logged()
    module.w = torch.nn.Parameter(torch.ones(1))
    module.c = child_leaf(impl)
    module.flag = True
    module.eval()

    assert log == ["w", "c", "flag", "training"]


def test_the_mro_after_module_gets_plain_attributes(impl: Implementation) -> None:
    """``__setattr__`` and ``__delattr__`` of a mixin behind Module are called for plain values."""
    log = []

    class Mixin:
        def __setattr__(self, name, value):
            log.append(("set", name))
            super().__setattr__(name, value)

        def __delattr__(self, name):
            log.append(("delete", name))
            super().__delattr__(name)

    class Net(impl.Module, Mixin):
        pass

    module = Net()
    log.clear()
    module.flag = 1
    module.items = [1]
    module.thing = object()
    module.w = torch.nn.Parameter(torch.ones(1))
    del module.flag
    del module.w

    assert log == [("set", "flag"), ("set", "items"), ("set", "thing"), ("delete", "flag")]


def test_writing_past_setattr(impl: Implementation) -> None:
    """``object.__setattr__`` and the instance ``__dict__`` bypass registration."""
    module = empty(impl)
    parameter = torch.nn.Parameter(torch.ones(1))
    object.__setattr__(module, "x", parameter)
    vars(module)["y"] = parameter

    assert module.x is module.y is parameter
    assert list(module.parameters()) == []


def test_direct_writes_to_the_registries_are_seen_at_once(impl: Implementation) -> None:
    """Members written into, or removed from, the registries appear in reads and in the walk."""
    module = leaf(impl)
    parameter, buffer = torch.nn.Parameter(torch.ones(1)), torch.ones(1)
    module._parameters["extra"] = parameter
    module._buffers.update(more=buffer)
    module._modules["child"] = child = child_leaf(impl)
    del module._parameters["weight"]

    assert module.extra is parameter
    assert module.more is buffer
    assert module.child is child
    assert not hasattr(module, "weight")
    assert [name for name, _ in module.named_parameters()] == ["extra", "child.weight"]
    assert "more" in module.state_dict()


class Fetched(dict):
    """A registry that, as sharding libraries do, produces its values when they are read."""

    def __init__(self, pairs):
        super().__init__(pairs)
        self.reads = []

    def __getitem__(self, key):
        self.reads.append(key)
        value = super().__getitem__(key)
        return value.fetch() if isinstance(value, Handle) else value


class Handle:
    """A stand-in for a tensor that must be fetched first."""

    def __init__(self, value):
        self.value = value

    def fetch(self):
        """Return the tensor."""
        return self.value


@pytest.mark.parametrize("registry", ["_parameters", "_buffers", "_modules"])
def test_a_registry_may_be_replaced_by_a_dict_subclass(impl: Implementation, registry) -> None:
    """The given object is kept, and attribute reads go through its ``__getitem__``."""
    module = leaf(impl)
    value = child_leaf(impl)
    replacement = Fetched({"x": Handle(value)})
    setattr(module, registry, replacement)

    assert vars(module)[registry] is replacement
    assert module.x is value
    assert replacement.reads == ["x"]


def test_a_replaced_registry_takes_new_members(impl: Implementation) -> None:
    """Later registrations and deletions go to the object that was assigned."""
    module = leaf(impl)
    replacement = Fetched(module._parameters)
    module._parameters = replacement
    module.extra = torch.nn.Parameter(torch.ones(1))
    del module.weight

    assert module._parameters is replacement
    assert list(replacement) == ["bias", "extra"]
    assert [name for name, _ in module.named_parameters()] == ["extra"]
    assert "extra" in module.state_dict()


def test_registries_may_be_shared_or_emptied(impl: Implementation) -> None:
    """Two modules may share a registry, and an empty one may be assigned."""
    module, shell = tree(impl), empty(impl)
    shell._modules = module._modules
    shell._parameters = module._parameters.copy()
    module._parameters = {}

    assert shell.left is module.left
    assert not hasattr(module, "gain")
    assert next(iter(dict(shell.named_parameters()))) == "gain"


@for_each(
    "call",
    [
        "m.training",
        "m.dump_patches",
        "m.call_super_init",
        "m._version",
        "m._compiled_call_impl",
        "m._is_full_backward_hook",
        "m.T_destination",
        "type(m).T_destination",
        "m._get_name()",
        "m.extra_repr()",
        "m.eval().training",
        "type(m).__mro__[-1]",
        "m.__class__.__name__",
        "hash(m) == hash(m) and m == m and m != type(m)()",
        "bool(m)",
        "isinstance(m, torch.nn.Module)",
        "len(m)",
        "iter(m)",
        "m[0]",
        "m + m",
        "m < m",
        "'x' in m",
    ],
)
def test_small_facts_about_an_instance(call: str) -> None:
    """Class attributes, identity and missing protocols are those of a torch module."""
    assert same(lambda impl: run(call, empty(impl)))


def test_modules_take_weak_references_and_die_without_the_collector(impl: Implementation) -> None:
    """A module is in no reference cycle of its own making."""
    gc.disable()
    try:
        module = tree(impl)
        module.state_dict()
        list(module.named_parameters())
        watched = [weakref.ref(each) for each in module.modules()]
        del module
        alive = [reference for reference in watched if reference() is not None]
    finally:
        gc.enable()

    assert alive == []
