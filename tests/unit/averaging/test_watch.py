from collections.abc import Callable

import pytest
import torch
from torch import nn

from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.names import canonical_name
from modkit.averaging.watch import Watch
from tests.cases import for_each


def watch_of(net: nn.Module) -> Watch:
    """Watch the parameters of a model, as an average does."""
    named = NamedTensors(net)
    return Watch([named], [member.tensor for member in named.parameters.values()])


class Net(nn.Module):
    """A parameter, a buffer, an empty place, and children that have such."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_parameter("empty", None)
        self.register_buffer("mean", torch.zeros(2))
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


class Alike(nn.Identity):
    """A module that says it equals any other."""

    __hash__ = nn.Identity.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def add_a_parameter(net: Net) -> None:
    """Register one more."""
    net.body.extra = nn.Parameter(torch.ones(1))


def add_a_buffer(net: Net) -> None:
    """Register one where there was none."""
    net.body.register_buffer("extra", torch.ones(1))


def add_a_child(net: Net) -> None:
    """Register a child below one that had none."""
    net.body.child = nn.Identity()


def fill_the_empty_place(net: Net) -> None:
    """Register a parameter where None was."""
    net.empty = nn.Parameter(torch.ones(1))


def remove_a_parameter(net: Net) -> None:
    """Register None in its place."""
    net.body.bias = None


def replace_by_an_equal_parameter(net: Net) -> None:
    """Register another object with the same value, of one element, which could be compared."""
    net.scale = nn.Parameter(net.scale.detach().clone())


def replace_a_child(net: Net) -> None:
    """Register another layer of the same kind."""
    net.head = nn.Linear(2, 2)


def tie(net: Net) -> None:
    """Let two layers share a weight."""
    net.head.weight = net.body.weight


def rename_a_parameter(net: Net) -> None:
    """Move a parameter to another name."""
    net.gain = net.scale
    del net.scale


def rename_a_buffer(net: Net) -> None:
    """Move a buffer to another name."""
    net.register_buffer("average", net.mean)
    del net.mean


def cast(net: Net) -> None:
    """Keep the objects and change their dtype."""
    net.half()


def reshape(net: Net) -> None:
    """Give a parameter a part of its own memory."""
    net.body.bias.data = net.body.bias.data[:1]


CHANGES = [
    add_a_parameter,
    add_a_buffer,
    add_a_child,
    fill_the_empty_place,
    remove_a_parameter,
    replace_by_an_equal_parameter,
    replace_a_child,
    tie,
    rename_a_parameter,
    rename_a_buffer,
    cast,
    reshape,
]


@for_each("change", CHANGES, ids=lambda change: change.__name__)
@for_each("guarded", [True, False], ids=["guards", "no guards"])
def test_a_change_is_seen(
    change: Callable[[Net], None], guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changes which tensors a model has is seen, with dynamo's guards and without."""
    if not guarded:
        monkeypatch.setattr("modkit.averaging.watch.tensor_guard", lambda tensors: None)
    net = Net()
    watch = watch_of(net)
    before = watch.changed()
    change(net)

    assert not before
    assert watch.changed()


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "no guards"])
def test_new_values_are_no_change(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, loading, data that are set, and buffers that are replaced leave all as it is."""
    if not guarded:
        monkeypatch.setattr("modkit.averaging.watch.tensor_guard", lambda tensors: None)
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
        replace_by_an_equal_parameter(net)
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
        ("head.module.weight", "head.module.weight"),
    ],
)
def test_names_lose_all_wrappers(name: str, expected: str) -> None:
    """Several wrappers around one another are stripped, and a user's child called `module` is kept."""
    assert canonical_name(name) == expected
