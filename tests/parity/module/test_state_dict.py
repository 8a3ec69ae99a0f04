import collections

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, tree
from tests.parity.module.contents import run


def described(state: object) -> list[object]:
    """Describe a state dict: its type, its items in order, and its metadata."""
    metadata = getattr(state, "_metadata", None)
    items = [(key, value) for key, value in state.items()]
    return [type(state).__name__, items, type(metadata).__name__, dict(metadata or {})]


@for_each(
    "call",
    [
        "m.state_dict()",
        "m.state_dict(prefix='net.')",
        "m.state_dict(prefix='net')",
        "m.state_dict(prefix='.')",
        "m.state_dict(keep_vars=True)",
        "m.state_dict(keep_vars=1)",
        "m.state_dict(prefix='a.b.', keep_vars=True)",
        "m.state_dict(destination=None)",
        "m.state_dict(destination={})",
        "m.state_dict(destination={'old': 3}, prefix='p.')",
        "m.right.state_dict()",
        "m.left.inner.state_dict(prefix='left.inner.')",
    ],
)
def test_keys_order_values_and_metadata(call):
    """The result has torch's type, keys, order, tensors and metadata."""
    assert same(lambda impl: described(run(call, tree(impl))))[0] == "returned"


def test_the_tensors_share_memory_and_are_detached(impl: Implementation) -> None:
    """By default the tensors are detached views of the members; ``keep_vars`` gives themselves."""
    module = tree(impl)
    state, kept = module.state_dict(), module.state_dict(keep_vars=True)

    assert state["gain"] is not module.gain
    assert state["gain"].data_ptr() == module.gain.data_ptr()
    assert not any(tensor.requires_grad for tensor in state.values())
    assert type(state["gain"]) is torch.Tensor
    assert state["right.mean"] is not module.right.mean
    assert kept["gain"] is module.gain
    assert kept["right.mean"] is module.right.mean


def test_a_given_destination_is_filled_and_returned(impl: Implementation) -> None:
    """The destination is written to in place; what it held stays, equal keys are replaced."""
    destination = collections.OrderedDict(gain=3, other=4)
    destination._metadata = collections.OrderedDict(old={"version": 9})
    module = tree(impl)
    result = module.state_dict(destination=destination)

    assert result is destination
    assert list(result)[:2] == ["gain", "other"]
    assert torch.equal(result["gain"], module.gain)
    assert list(result._metadata) == ["old", "", "left", "left.inner", "right", "again"]


def test_any_mapping_may_be_the_destination():
    """The destination needs item assignment only."""

    class Writer:
        def __init__(self):
            self.written = []

        def __setitem__(self, key, value):
            self.written.append((key, value))

    class WithMetadata(Writer):
        def __init__(self):
            super().__init__()
            self._metadata = {}

    def scenario(impl):
        found = []
        for kind in (Writer, WithMetadata, collections.UserDict, collections.ChainMap):
            destination = kind()
            result = tree(impl).state_dict(destination=destination, prefix="p.")
            items = getattr(destination, "written", None) or list(destination.items())
            metadata = getattr(destination, "_metadata", "none")
            found.append((result is destination, items, metadata))
        return found

    assert same(scenario)[0] == "returned"


@for_each(
    "call",
    [
        "m.state_dict(None)",
        "m.state_dict({})",
        "m.state_dict({}, 'p.')",
        "m.state_dict({}, 'p.', True)",
        "m.state_dict(None, 'p.', True)",
        "m.state_dict({}, 'p.', prefix='q.')",
        "m.state_dict({}, 'p.', True, keep_vars=False)",
        "m.state_dict({'a': 1}, destination={'b': 2})",
        "m.state_dict({}, '', False, 'surplus')",
        "m.state_dict({}, keep_vars=True)",
    ],
)
@pytest.mark.filterwarnings("ignore:Positional args are being deprecated")
def test_the_positional_form(call):
    """Positional arguments still work, each merged with its keyword as in torch."""
    assert same(lambda impl: described(run(call, tree(impl))))[0] == "returned"


def test_the_positional_form_warns_at_the_callers_line(impl: Implementation) -> None:
    """The deprecation is announced where ``state_dict`` was called, with torch's text."""
    with pytest.warns(FutureWarning, match="Positional args are being deprecated") as caught:
        tree(impl).state_dict({}, "p.")

    assert [warning.filename for warning in caught] == [__file__]
    assert same(lambda impl: tree(impl).state_dict({}))[:2] == ("raised", "FutureWarning")


def test_the_version_of_a_class_is_recorded(impl: Implementation) -> None:
    """``_version`` of the class, or of the instance, is in the metadata of each module."""

    class Third(impl.Module):
        _version = 3

    class Unknown(impl.Module):
        _version = None

    root = Third()
    root.a, root.b, root.c = Third(), Unknown(), impl.Module()
    root.a._version = 8
    root.a.register_buffer("x", torch.ones(1))

    assert root.state_dict()._metadata == {
        "": {"version": 3},
        "a": {"version": 8},
        "b": {"version": None},
        "c": {"version": 1},
    }


def with_extra(impl: Implementation, value: object, methods: str = "both") -> torch.nn.Module:
    """Build a parent whose child has extra state."""

    class Extra(impl.Module):
        def __init__(self):
            super().__init__()
            self.extra = value
            self.weight = torch.nn.Parameter(torch.ones(1))

        if methods in {"both", "get"}:

            def get_extra_state(self):
                return self.extra

        if methods in {"both", "set"}:

            def set_extra_state(self, state):
                self.extra = state

    root = impl.Module()
    root.child = Extra()
    return root


@for_each("value", [torch.ones(2), {"a": [1]}, None, 3, "text", [torch.zeros(1)], (1, 2)], ids=repr)
def test_extra_state_is_saved_as_it_is(value):
    """Whatever ``get_extra_state`` returns is stored behind the members of its module."""

    def scenario(impl):
        state = with_extra(impl, value).state_dict()
        return described(state), state["child._extra_state"] is value

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("methods", ["get", "set", "none"])
def test_one_of_the_extra_state_methods_alone(methods):
    """Saving looks for ``get_extra_state``, loading for ``set_extra_state``, on the class."""

    def scenario(impl):
        module = with_extra(impl, 3, methods)
        state = module.state_dict()
        try:
            loaded = repr(module.load_state_dict(state))
        except RuntimeError as error:
            loaded = str(error)
        return list(state), loaded

    assert same(scenario)[0] == "returned"


def test_extra_state_methods_of_an_instance_are_ignored(impl: Implementation) -> None:
    """Only the class is asked whether there is extra state."""
    module = child_leaf(impl)
    module.get_extra_state = lambda: 3

    assert list(module.state_dict()) == ["weight"]


def test_the_destination_has_the_metadata_while_saving(impl: Implementation) -> None:
    """A module's metadata entry exists before its own state is written."""
    seen = []

    class Own(impl.Module):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            seen.append({key: dict(entry) for key, entry in destination._metadata.items()})

    root = Own()
    root.child = Own()
    root.state_dict()

    assert seen == [{"": {"version": 1}}, {"": {"version": 1}, "child": {"version": 1}}]


def test_uninitialized_members():
    """Saving an uninitialized parameter in an ordinary module ends as in torch."""

    def scenario(impl):
        module = empty(impl)
        module.weight = torch.nn.UninitializedParameter()
        return list(module.state_dict()), list(module.state_dict(keep_vars=True))

    assert same(scenario)
