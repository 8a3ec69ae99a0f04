import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import child_leaf, empty, leaf, scaling, tensors
from tests.parity.module.contents import run


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
