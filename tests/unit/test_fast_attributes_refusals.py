import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import modkit
from tests.helpers import Implementation, freeze
from tests.unit.fast_networks import attributes, make_net


CONVERSIONS: dict[str, Callable[[torch.nn.Module], object]] = {
    "to": lambda net: net.to("cpu"),
    "float": lambda net: net.float(),
    "share_memory": lambda net: net.share_memory(),
    "child": lambda net: net.inner.to(torch.float32),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_without_an_effect_pass(impl: Implementation, conversion: str) -> None:
    """Moving a model to where it is, or sharing its memory, replaces nothing, and is allowed."""
    net = make_net(impl)
    net(torch.rand(3, 4)).sum().backward()
    before = attributes(net)

    with modkit.fast_attributes(net):
        CONVERSIONS[conversion](net)

    assert attributes(net) == before


def replace_weights(net: torch.nn.Module) -> object:
    """Call the network with other weights, by the function of torch that does so."""
    weights = {name: value + 1 for name, value in net.named_parameters()}
    return torch.func.functional_call(net, weights, torch.rand(3, 4))


CHANGES: dict[str, Callable[[Any], object]] = {
    "replace a parameter": lambda net: setattr(net, "scale", torch.nn.Parameter(torch.ones(4))),
    "empty a parameter": lambda net: setattr(net, "scale", None),
    "fill an empty slot": lambda net: setattr(net, "nothing", torch.nn.Parameter(torch.ones(1))),
    "replace a buffer": lambda net: setattr(net, "offset", torch.ones(4)),
    "replace a child": lambda net: setattr(net, "inner", torch.nn.Linear(4, 4)),
    "empty a child": lambda net: setattr(net, "inner", None),
    "assign a new parameter": lambda net: setattr(net, "new", torch.nn.Parameter(torch.ones(1))),
    "assign a new buffer": lambda net: setattr(net, "new", torch.nn.Buffer(torch.ones(1))),
    "assign a new child": lambda net: setattr(net, "new", torch.nn.ReLU()),
    "delete a parameter": lambda net: delattr(net, "scale"),
    "delete a buffer": lambda net: delattr(net, "offset"),
    "delete a child": lambda net: delattr(net, "inner"),
    "register_parameter": lambda net: net.register_parameter("new", None),
    "register_buffer": lambda net: net.register_buffer("new", None),
    "register_module": lambda net: net.register_module("new", None),
    "add_module": lambda net: net.add_module("inner", torch.nn.ReLU()),
    "set_submodule": lambda net: net.set_submodule("blocks.2", torch.nn.Tanh()),
    "append": lambda net: net.blocks.append(torch.nn.Tanh()),
    "registry, item": lambda net: net._parameters.__setitem__("scale", None),
    "registry, del": lambda net: net._buffers.__delitem__("offset"),
    "registry, pop": lambda net: net._modules.pop("inner"),
    "registry, popitem": lambda net: net._modules.popitem(),
    "registry, clear": lambda net: net._buffers.clear(),
    "registry, update": lambda net: net._parameters.update(scale=None),
    "registry, setdefault": lambda net: net._parameters.setdefault("new", None),
    "registry, union": lambda net: net._parameters.__ior__({"scale": None}),
    "load with assign": lambda net: net.load_state_dict(net.state_dict(), assign=True),
    "load with assign by position": lambda net: net.load_state_dict(net.state_dict(), True, True),
    "convert the dtype": lambda net: net.double(),
    "move": lambda net: net.to("meta"),
    "to_empty": lambda net: net.to_empty(device="cpu"),
    "call with other weights": replace_weights,
    "prune": lambda net: prune.random_unstructured(net.inner, "weight", 0.5),
    "parametrize": lambda net: torch.nn.utils.parametrizations.weight_norm(net.inner),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_structure_are_refused(impl: Implementation, change: str) -> None:
    """What would make the two places differ raises, names the way out and changes nothing."""
    net, x = make_net(impl).eval(), torch.rand(3, 4)
    expected, before = freeze(net(x)), attributes(net)

    with modkit.fast_attributes(net):
        with pytest.raises(RuntimeError, match="leave the fast_attributes block first"):
            CHANGES[change](net)
        actual = freeze(net(x))

    assert actual == expected
    assert attributes(net) == before


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_changes_work_afterwards(impl: Implementation, change: str) -> None:
    """Nothing of the block is left that could refuse a change."""
    net = make_net(impl)
    with modkit.fast_attributes(net):
        net.eval()

    CHANGES[change](net)

    assert not net.training


@pytest.mark.parametrize("convert", [torch.nn.Module.half, lambda net: net.to(torch.float64)])
def test_a_refused_conversion_converts_nothing(impl: Implementation, convert: Any) -> None:
    """All tensors, gradients included, keep their dtype, wherever in the tree they are."""
    net = make_net(impl)
    net(torch.rand(3, 4)).sum().backward()

    with modkit.fast_attributes(net), pytest.raises(RuntimeError, match="be converted"):
        convert(net)

    tensors = [*net.parameters(), *(p.grad for p in net.parameters()), *net.buffers()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}


COPIES: dict[str, Callable[[torch.nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda net: torch.save(net, io.BytesIO()),
    "replicate": lambda net: net._replicate_for_data_parallel(),
    "copy of the registry": lambda net: copy.copy(net._parameters),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("at", ["the model", "a child"])
def test_copies_are_refused(impl: Implementation, kind: str, at: str) -> None:
    """Copying or pickling a module of the tree raises and names the way out."""
    net = impl.nn.Sequential(impl.nn.Linear(2, 2))

    with (
        modkit.fast_attributes(net),
        pytest.raises(RuntimeError, match="leave the fast_attributes block first"),
    ):
        COPIES[kind](net if at == "the model" else net[0])


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
def test_a_model_around_the_block_cannot_be_copied(impl: Implementation, kind: str) -> None:
    """A parent that is itself outside is refused as well, as it would copy what is inside."""
    net = impl.nn.Sequential(impl.nn.Linear(2, 2))

    with (
        modkit.fast_attributes(net[0]),
        pytest.raises(RuntimeError, match="leave the fast_attributes block first"),
    ):
        COPIES[kind](net)


def test_saving_the_state_works_inside(impl: Implementation) -> None:
    """A state dict holds tensors only, and can be copied and saved at any time."""
    net, file = impl.nn.Linear(2, 2), io.BytesIO()

    with modkit.fast_attributes(net):
        torch.save(net.state_dict(), file)
        copied = copy.deepcopy(net.state_dict())
    file.seek(0)

    assert freeze(torch.load(file)) == freeze(copied) == freeze(net.state_dict())
