import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, leaf, scaling, tensors, tree
from tests.parity.module.contents import run


def test_the_registered_objects_are_kept(impl: Implementation) -> None:
    """Registration stores the very objects, whichever way they come in."""
    module = empty(impl)
    parameter, buffer, child = torch.nn.Parameter(torch.ones(1)), torch.ones(1), child_leaf(impl)
    module.register_parameter("p", parameter)
    module.register_buffer("b", buffer)
    module.register_module("c", child)
    module.p2, module.b2, module.c2 = parameter, torch.nn.Buffer(buffer), child

    assert module.p is module.p2 is parameter
    assert module.b is buffer
    assert module._buffers["b2"] is module.b2
    assert module.c is module.c2 is child


def test_assignment_keeps_the_place_in_the_order(impl: Implementation) -> None:
    """A new value for a registered name stays at its place; a name added again goes last."""
    module = empty(impl)
    for name in "abc":
        setattr(module, name, torch.nn.Parameter(torch.zeros(1)))
    module.a = torch.nn.Parameter(torch.ones(1))
    module.b = None
    kept = list(module._parameters)
    del module.b
    module.b = torch.nn.Parameter(torch.ones(1))

    assert kept == ["a", "b", "c"]
    assert list(module._parameters) == ["a", "c", "b"]


def test_a_stand_in_for_a_module_is_registered():
    """An object whose ``__class__`` says that it is a module is stored as a child."""
    from unittest.mock import Mock

    def scenario(impl):
        module = empty(impl)
        module.child = Mock(spec=torch.nn.Module)
        return list(module._modules)

    assert same(scenario) == ("returned", ("list", [("str", "'child'")]))


def test_an_override_of_register_parameter_sees_assignments(impl: Implementation) -> None:
    """Assigning a parameter, or ``None`` to its slot, goes through the class's own method."""
    log = []

    class Logged(impl.Module):
        def register_parameter(self, name, param):
            log.append((name, param is None))
            super().register_parameter(name, param)

    module = Logged()
    module.w = torch.nn.Parameter(torch.ones(1))
    module.w = None
    module.other = 3

    assert log == [("w", False), ("w", True)]
    assert module._parameters == {"w": None}


@pytest.mark.parametrize("method", ["register_parameter", "register_buffer"])
def test_a_replacement_of_the_base_method_is_reached(impl, method, monkeypatch):
    """Tools that patch ``register_*`` on ``torch.nn.Module`` see assignments and direct calls."""
    log = []
    original = getattr(torch.nn.Module, method)

    def patched(self, name, *args, **kwargs):
        log.append(name)
        return original(self, name, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, method, patched)
    module = empty(impl)
    kind = torch.nn.Parameter if method == "register_parameter" else torch.nn.Buffer
    module.assigned = kind(torch.ones(1))
    getattr(module, method)("called", kind(torch.ones(1)))

    assert log == ["assigned", "called"]


def test_a_replacement_of_the_base_method_may_change_the_value(impl, monkeypatch):
    """A patch that moves what is registered to the meta device decides what is stored."""
    original = torch.nn.Module.register_parameter

    def patched(self, name, param):
        original(self, name, param)
        self._parameters[name] = torch.nn.Parameter(param.to("meta"))

    monkeypatch.setattr(torch.nn.Module, "register_parameter", patched)
    module = child_leaf(impl)

    assert module.weight.is_meta


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
@pytest.mark.parametrize("asked", ["property", "getattr"])
def test_a_name_that_is_taken_is_asked_for_once(impl: Implementation, kind, asked) -> None:
    """A property may compute something, such as a step of a spectral norm's power iteration."""
    reads = []

    class Lazy(impl.Module):
        if asked == "property":

            @property
            def weight(self):
                reads.append("weight")
                return torch.ones(1)

        else:

            def __getattr__(self, name):
                reads.append(name)
                return torch.ones(1)

    register = getattr(Lazy(), f"register_{kind}")
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        register("weight", None)

    assert reads == ["weight"]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_name_is_asked_for_once_for_a_value_that_is_refused(impl: Implementation, kind) -> None:
    """A `__getattr__` of the class sees each lookup, of which torch makes at most one."""
    reads = []

    class Watched(impl.Module):
        def __getattr__(self, name):
            reads.append(name)
            return super().__getattr__(name)

    register = getattr(Watched(), f"register_{kind}")
    reads.clear()
    with pytest.raises(TypeError):
        register("weight", "text")

    assert reads == (["weight"] if kind != "module" else [])


@for_each("method", ["register_parameter", "register_buffer"])
@for_each("call", ["m.double()", "m.to('meta')", "m.to_empty(device='cpu')", "m.share_memory()"])
def test_none_is_ignored_by_operations(impl: Implementation, method: str, call: str) -> None:
    """Operations that run on parameters or buffers skip a member registered as None."""
    module = scaling(impl)
    getattr(module, method)("empty", None)
    run(call, module)

    assert module.empty is None
    assert list(tensors(module)) == [module.factor]


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


def test_a_replaced_registry_takes_new_members(impl: Implementation) -> None:
    """Later registrations and deletions go to the object that was assigned."""
    module = leaf(impl)
    replacement = type("Registry", (dict,), {})(module._parameters)
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
