from collections.abc import Callable

import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.recipe import Watch
from modkit.averaging.tensors import NamedTensors, canonical_names
from tests.cases import for_each


def watch_of(net: nn.Module) -> Watch:
    """Watch the parameters of a model, as an average does."""
    named = NamedTensors(net)
    return Watch(named.states, [member.tensor for member in named.parameters.values()])


class Net(nn.Module):
    """A parameter, a buffer, an empty place, and children that have such."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_parameter("empty", None)
        self.register_buffer("mean", torch.zeros(2))
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


def new_scale(net: Net) -> nn.Parameter:
    """Return another parameter with the value of one of the model."""
    return nn.Parameter(net.scale.detach().clone())


class Alike(nn.Identity):
    """A module that says it equals any other."""

    __hash__ = nn.Identity.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def rename(net: nn.Module, table: str, old: str, new: str) -> None:
    """Move a parameter or a buffer to another name."""
    getattr(net, table)[new] = getattr(net, table).pop(old)


CHANGES: dict[str, Callable[[Net], object]] = {
    "add a parameter": lambda net: net.body.register_parameter("extra", new_scale(net)),
    "add a buffer where there was none": lambda net: net.body.register_buffer("extra", net.mean),
    "add a child where there was none": lambda net: net.body.add_module("child", nn.Identity()),
    "fill the empty place": lambda net: setattr(net, "empty", new_scale(net)),
    "remove a parameter": lambda net: setattr(net.body, "bias", None),
    # Of one element, which could be compared.
    "replace by an equal parameter": lambda net: setattr(net, "scale", new_scale(net)),
    "replace a child": lambda net: setattr(net, "head", nn.Linear(2, 2)),
    "tie": lambda net: setattr(net.head, "weight", net.body.weight),
    "rename a parameter": lambda net: rename(net, "_parameters", "scale", "gain"),
    "rename a buffer": lambda net: rename(net, "_buffers", "mean", "average"),
    "cast": lambda net: net.half(),
    "reshape": lambda net: setattr(net.body.bias, "data", net.body.bias.data[:1]),
}


@for_each("change", CHANGES)
@for_each("guarded", [True, False], ids=["guards", "no guards"])
def test_a_change_is_seen(change: str, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes which tensors a model has is seen, with dynamo's guards and without."""
    if not guarded:
        monkeypatch.setattr("modkit.averaging.recipe.tensor_guard", lambda tensors: None)
    net = Net()
    watch = watch_of(net)
    before = watch.changed()
    CHANGES[change](net)

    assert not before
    assert watch.changed()


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "no guards"])
def test_new_values_are_no_change(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, loading, data that are set, and buffers that are replaced leave all as it is."""
    if not guarded:
        monkeypatch.setattr("modkit.averaging.recipe.tensor_guard", lambda tensors: None)
    net = Net()
    watch = watch_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.body(torch.ones(2)).sum().backward()
    optimizer.step()
    net.load_state_dict(Net().state_dict())
    net.scale.data = torch.full((1,), 3.0)
    net.mean = torch.ones(3)
    net.eval()

    assert not watch.changed()
    with modkit.fast_inference(net):
        assert not watch.changed()


def test_a_child_that_equals_every_other_is_told_apart() -> None:
    """The equality that a user's module defines does not count, only identity does."""
    net = nn.Sequential(nn.Linear(1, 1), Alike())
    watch = watch_of(net)
    before = watch.changed()
    net[1] = Alike()

    assert not before
    assert watch.changed()


@pytest.mark.parametrize("replaced", [False, True])
def test_looking_runs_no_operation(replaced: bool) -> None:
    """A check does nothing with tensors, neither when nothing has changed nor when one has."""
    net = Net()
    watch = watch_of(net)
    if replaced:
        net.scale = new_scale(net)
    with torch.autograd.profiler.profile() as profile:
        changed = watch.changed()

    assert changed is replaced
    assert [event.name for event in profile.function_events] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.module.weight", "weight"),
        ("module._orig_mod.module.0._fsdp_wrapped_module.weight", "0.weight"),
        ("_checkpoint_wrapped_module.module", "module"),
        ("_forward_module.module.0.weight", "0.weight"),
        ("head.module.weight", "head.module.weight"),
    ],
)
def test_names_lose_all_wrappers(name: str, expected: str) -> None:
    """Several wrappers around one another are stripped, and a user's child called `module` is kept."""
    assert canonical_names([name]) == {name: expected}
