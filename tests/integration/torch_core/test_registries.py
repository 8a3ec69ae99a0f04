import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net


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


@for_each("network", NETWORKS)
def test_registries_are_plain_dicts(impl: Implementation, network: str) -> None:
    """Registries are exact dicts, hook tables ordered ones, and there is no further state."""
    for module in make_net(impl.nn, network).modules():
        reference = torch.nn.Module().__dict__

        assert {type(module.__dict__[name]) for name in REGISTRIES} == {dict}
        for name, empty in reference.items():
            assert type(module.__dict__[name]) is type(empty)


def test_instance_keys() -> None:
    """A layer's ``__dict__`` has torch's keys, apart from its place in ``torch.nn``."""

    def scenario(impl: Implementation) -> list[list[str]]:
        nets = [make_net(impl.nn, network) for network in NETWORKS]
        return [
            [name for name in module.__dict__ if name != "__module__"]
            for net in nets
            for module in net.modules()
        ]

    keys = agree(scenario)

    assert all("_load_state_dict_post_hooks" in names for names in keys)


def test_fresh_module_has_only_the_documented_state(impl: Implementation) -> None:
    """A user's module has the same instance attributes as torch's, in the same order."""

    class Own(impl.nn.Module):
        pass

    assert list(Own().__dict__) == list(torch.nn.Module().__dict__)
    assert freeze(Own().__dict__) == freeze(torch.nn.Module().__dict__)


@for_each(
    "write",
    [
        lambda net, new: net._parameters.__setitem__("w", new),
        lambda net, new: net._parameters.update(w=new),
        lambda net, new: dict.__setitem__(net._parameters, "w", new),
        lambda net, new: setattr(net, "_parameters", {**net._parameters, "w": new}),
        lambda net, new: net.__dict__.__setitem__("_parameters", {"w": new}),
        lambda net, new: net.__dict__.update(_parameters=OrderedDict(w=new)),
    ],
    ids=["setitem", "update", "dict_setitem", "assign", "instance_dict", "instance_update"],
)
def test_direct_writes_are_seen_at_once(impl: Implementation, write: Any) -> None:
    """A parameter written into the registry is the one that reads and calls use."""
    net, batch = make_net(impl.nn, "free"), make_batch("free")
    new = torch.nn.Parameter(torch.full((6,), 3.0))
    write(net, new)
    clone = make_net(impl.nn, "free")
    clone.w = new

    assert net.w is new
    assert dict(net.named_parameters(recurse=False))["w"] is new
    assert net.state_dict(keep_vars=True)["w"] is new
    assert torch.equal(net(batch), clone(batch))


def test_direct_deletions_are_seen_at_once(impl: Implementation) -> None:
    """A member taken out of its registry is gone, and may come back in another role."""
    net = make_net(impl.nn, "free")
    weight = net._parameters.pop("w")
    del net._modules["out"]
    net._buffers.clear()

    assert not hasattr(net, "w")
    assert not hasattr(net, "out")
    assert list(net.state_dict()) == ["inner.weight", "inner.bias"]

    net.w = weight.detach() * 2

    assert "w" in net.__dict__
    assert "w" not in net._parameters


@pytest.mark.parametrize("name", REGISTRIES)
def test_assigned_registry_is_kept(impl: Implementation, name: str) -> None:
    """A dict subclass assigned in place of a registry stays that very object."""

    class Own(dict):
        pass

    net, batch = make_net(impl.nn, "free"), make_batch("free")
    replacement = Own(getattr(net, name))
    setattr(net, name, replacement)
    reference = make_net(torch.nn, "free")

    assert getattr(net, name) is replacement
    assert torch.equal(net(batch), reference(batch))
    assert freeze(dict(net.state_dict())) == freeze(dict(reference.state_dict()))


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


@pytest.mark.parametrize("table", ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks"])
def test_replaced_hook_tables(impl: Implementation, table: str) -> None:
    """Hooks put into a table directly run; an assigned empty table runs none."""
    net, batch = make_net(impl.nn, "nested"), make_batch("nested").requires_grad_()
    seen = []

    def hook(*args: Any) -> None:
        seen.append(args[0])

    net.register_full_backward_hook(lambda *_args: None).remove()
    setattr(net, table, OrderedDict({1000: hook}))
    net(batch).sum().backward()
    after_direct = list(seen)
    setattr(net, table, OrderedDict())
    net(batch).sum().backward()

    assert after_direct == [net]
    assert seen == after_direct


def test_partly_reset_hooks(impl: Implementation) -> None:
    """Ids left over in the companion tables of replaced hook tables do no harm."""
    net, batch = make_net(impl.nn, "nested"), make_batch("nested")
    net.register_forward_hook(lambda _m, _a, _k, out: out * 2, with_kwargs=True, always_call=True)
    net.register_forward_pre_hook(lambda _m, args, kwargs: (args, kwargs), with_kwargs=True)
    net._forward_hooks = OrderedDict()
    net._forward_pre_hooks.clear()
    net.register_forward_hook(lambda _m, _args, output: output + 1)

    assert torch.equal(net(batch), make_net(torch.nn, "nested")(batch) + 1)


def test_forward_as_an_instance_attribute() -> None:
    """An instance's own ``forward`` is called, with hooks, and can be taken back."""

    def scenario(impl: Implementation) -> list[Tensor]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        old = net.forward
        net.forward = lambda x: old(x) * 2
        net.register_forward_hook(lambda _m, _args, output: output + 1)
        outputs = [net(batch)]

        assert "forward" in net.__dict__

        del net.forward
        outputs.append(net(batch))
        net.blocks[0].forward = lambda x: x
        outputs.append(net(batch))
        return outputs

    wrapped, plain, _ = agree(scenario)

    assert torch.equal(wrapped, (plain - 1) * 2 + 1)


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


def test_shared_instance_dict(impl: Implementation) -> None:
    """Two objects that share one ``__dict__`` show the same members."""
    net = make_net(impl.nn, "free")

    class Proxy(impl.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            self.__dict__ = base.__dict__

    proxy = Proxy(net)
    net.w = torch.nn.Parameter(torch.zeros(6))
    proxy.extra = impl.nn.Linear(2, 2)

    assert proxy.w is net.w
    assert net.extra is proxy.extra


def test_shell_that_borrows_children(impl: Implementation) -> None:
    """A module that takes another one's registries over holds that one's members."""
    net = make_net(impl.nn, "nested")
    shell = impl.nn.Module()
    shell._modules = net._modules
    shell._parameters = net._parameters
    net.extra = impl.nn.Linear(2, 2)

    assert shell.extra is net.extra
    assert list(shell.state_dict()) == list(net.state_dict())
