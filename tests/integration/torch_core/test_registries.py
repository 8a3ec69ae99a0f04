import copy
from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.integration.networks import agree, gradients, make_batch, make_net


REGISTRIES = ("_parameters", "_buffers", "_modules")


class Gathering(dict):
    """A registry that fetches a parameter when it is read, as sharding libraries install."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.reads: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.reads.append(name)
        value = super().__getitem__(name)
        if isinstance(value, torch.nn.Parameter) and value.numel() == 0:
            value.data = torch.full((6,), 2.0)
        return value


def test_fresh_module_has_only_the_documented_state(impl: Implementation) -> None:
    """A user's module has the same instance attributes as torch's, in the same order."""

    class Own(impl.nn.Module):
        pass

    assert list(Own().__dict__) == list(torch.nn.Module().__dict__)
    assert freeze(Own().__dict__) == freeze(torch.nn.Module().__dict__)


def test_lazily_gathered_parameters() -> None:
    """Reads of attributes, calls and backward go through the ``__getitem__`` of the registry."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        net.w.data = torch.empty(0)
        for module in net.modules():
            module._parameters = Gathering(module._parameters)
        output = net(batch)
        output.sum().backward()

        assert "w" in net._parameters.reads
        assert isinstance(net.inner._parameters, Gathering)
        assert {"weight", "bias"} <= set(net.inner._parameters.reads)

        return output, gradients(net), dict(net.state_dict())

    _, grads, state = agree(scenario)

    assert torch.equal(state["w"], torch.full((6,), 2.0))
    assert grads["inner.weight"] is not None


def clone_by_update(net: torch.nn.Module) -> torch.nn.Module:
    """Clone a module the way accelerate does."""
    clone = net.__class__.__new__(net.__class__)
    clone.__dict__.update(net.__dict__)
    for name in REGISTRIES:
        setattr(clone, name, dict(getattr(net, name)))
    return clone


def clone_by_shallow_copies(net: torch.nn.Module) -> torch.nn.Module:
    """Clone a module the way torch.export does."""
    clone = copy.copy(net)
    clone.__dict__ = {copy.copy(key): copy.copy(value) for key, value in net.__dict__.items()}
    return clone


def clone_by_deepcopied_dict(net: torch.nn.Module) -> torch.nn.Module:
    """Clone a module the way parametrisations do."""
    clone = net.__new__(type(net))
    clone.__dict__ = copy.deepcopy(net.__dict__)
    return clone


CLONERS = [clone_by_update, clone_by_shallow_copies, clone_by_deepcopied_dict, copy.deepcopy]


@for_each("cloner", CLONERS, ids=lambda cloner: cloner.__name__)
def test_instance_dict_defines_the_module(impl: Implementation, cloner: Any) -> None:
    """A clone made from the ``__dict__`` alone has registries of its own, and computes the same."""
    net, batch = make_net(impl.nn, "free"), make_batch("free")
    clone = cloner(net)
    expected = copy.deepcopy(net)(batch)
    new = torch.nn.Parameter(torch.zeros(6))

    assert torch.equal(copy.deepcopy(clone)(batch), expected)

    clone.w = new

    assert clone.w is new
    assert clone._parameters["w"] is new
    assert net.w is not new

    clone.out = impl.nn.Identity()

    assert type(net.out) is impl.nn.Linear
    assert clone(batch).shape == (4, 6)
