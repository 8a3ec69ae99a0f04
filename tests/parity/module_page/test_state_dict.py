import collections
import io

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import BUFFERS, PARAMETERS, network, scaling


def state_keys(*own: str) -> list[str]:
    """List the keys of a network's state in torch's order."""
    names = ["scale", "mean", "count"]
    for block in ("block", "head.0"):
        names += [f"{block}.linear.weight", f"{block}.linear.bias"]
        names += [f"{block}.norm.weight", f"{block}.norm.bias"]
        names += [f"{block}.norm.{n}" for n in ("running_mean", "running_var")]
        names += [f"{block}.norm.num_batches_tracked"]
    return [*names, "head.1.weight", "head.1.bias", *own]


def test_state_dict_holds_parameters_and_persistent_buffers(impl: Implementation) -> None:
    """The state has the parameters and persistent buffers of the whole tree, by name."""
    state = network(impl).state_dict()

    assert list(state) == state_keys()
    assert set(state) == {*PARAMETERS, *BUFFERS} - {"scratch"}


def test_state_dict_leaves_none_out(impl: Implementation) -> None:
    """Parameters and buffers set to None have no key, also when set later."""
    model = network(impl)
    model.mean = None
    model.head[1].bias = None
    expected = [key for key in state_keys() if key not in {"mean", "head.1.bias"}]

    assert list(model.state_dict()) == expected


def test_keys_of_a_state_dict(impl: Implementation) -> None:
    """The example of `state_dict` lists a layer's two parameters."""
    assert sorted(impl.nn.Linear(2, 2).state_dict().keys()) == ["bias", "weight"]


def test_printed_keys_of_a_state_dict(impl: Implementation) -> None:
    """The page shows a sorted list of keys; torch 2.13 prints them in order of registration."""
    keys = impl.nn.Linear(2, 2).state_dict().keys()

    assert repr(keys) == "odict_keys(['weight', 'bias'])"


def test_state_dict_is_an_ordered_dict(impl: Implementation) -> None:
    """Without a destination, each call creates and returns a new OrderedDict."""
    model = network(impl)
    state = model.state_dict()

    assert type(state) is collections.OrderedDict
    assert model.state_dict() is not state
    assert model.state_dict(destination=None) is not state


def test_state_dict_is_a_shallow_copy(impl: Implementation) -> None:
    """The entries share storage with the parameters and buffers; changes show on both sides."""
    model = network(impl)
    state = model.state_dict()
    with torch.no_grad():
        model.scale.fill_(5.0)
    state["block.norm.running_mean"].fill_(7.0)

    assert torch.equal(state["scale"], torch.full((3,), 5.0))
    assert torch.equal(model.block.norm.running_mean, torch.full((3,), 7.0))
    assert all(
        state[name].data_ptr() == parameter.data_ptr()
        for name, parameter in model.named_parameters()
    )


def test_change_of_the_dictionary_leaves_the_module(impl: Implementation) -> None:
    """Removing or replacing entries of the dictionary does not change the module."""
    model = network(impl)
    scale = model.scale
    state = model.state_dict()
    state["scale"] = torch.zeros(3)
    del state["mean"]

    assert model.scale is scale
    assert list(model.state_dict()) == state_keys()


def test_state_is_detached_by_default(impl: Implementation) -> None:
    """keep_vars is False by default: the entries are detached from autograd."""
    model = network(impl)

    for state in (model.state_dict(), model.state_dict(keep_vars=False)):
        assert not any(value.requires_grad for value in state.values())
        assert {type(value) for value in state.values()} == {torch.Tensor}


def test_keep_vars_keeps_the_members_themselves(impl: Implementation) -> None:
    """With keep_vars=True the entries are the parameters and buffers, not detached."""
    model = network(impl)
    state = model.state_dict(keep_vars=True)

    assert all(state[name] is parameter for name, parameter in model.named_parameters())
    assert all(state[n] is buffer for n, buffer in model.named_buffers() if n != "scratch")
    assert state["scale"].requires_grad


def test_prefix_is_added_to_every_key(impl: Implementation) -> None:
    """The prefix stands before all keys as it is, without a dot of its own."""
    model = network(impl)

    assert list(model.state_dict(prefix="p.")) == [f"p.{key}" for key in state_keys()]
    assert list(model.state_dict(prefix="p")) == [f"p{key}" for key in state_keys()]
    assert list(model.state_dict(prefix="")) == state_keys()


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_destination_is_updated_and_returned(impl: Implementation, kind: type) -> None:
    """The state is added to the given dictionary, and the same object is returned."""
    destination = kind(before=1)

    assert network(impl).state_dict(destination=destination) is destination
    assert list(destination) == ["before", *state_keys()]


def test_positional_arguments_are_deprecated(impl: Implementation) -> None:
    """destination, prefix and keep_vars are accepted by position, in this order, with a warning."""
    model = scaling(impl)
    destination: dict[str, object] = {}
    with pytest.warns(FutureWarning, match="Positional args are being deprecated"):
        result = model.state_dict(destination, "p.", True)

    assert result is destination
    assert destination == {"p.factor": model.factor}
    assert destination["p.factor"] is model.factor


def test_state_goes_through_a_file(impl: Implementation) -> None:
    """A state dict can be saved, read back and loaded into a new module."""
    model, restored = network(impl), network(impl)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    result = restored.load_state_dict(torch.load(file, weights_only=True))

    assert repr(result) == "<All keys matched successfully>"
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in restored.state_dict().items()
    )


def test_pre_hook_runs_before_state_dict(impl: Implementation) -> None:
    """A state_dict pre-hook gets (module, prefix, keep_vars) before the state is collected."""
    calls: list[tuple[object, ...]] = []
    model = network(impl)
    model.register_state_dict_pre_hook(lambda *received: calls.append(received))
    model.block.register_state_dict_pre_hook(lambda *received: calls.append(received))
    model.state_dict()
    model.state_dict(prefix="p.", keep_vars=True)

    assert calls == [
        (model, "", False),
        (model.block, "block.", False),
        (model, "p.", True),
        (model.block, "p.block.", True),
    ]


def test_pre_hook_can_prepare_the_state(impl: Implementation) -> None:
    """Changes of the module by a state_dict pre-hook are visible in the state."""
    model = network(impl)

    def prepare(module, _prefix: str, _keep_vars: bool) -> None:
        module.count.fill_(9)

    model.register_state_dict_pre_hook(prepare)

    assert model.count.item() == 0
    assert model.state_dict()["count"].item() == 9


def test_pre_hook_of_a_layer_runs(impl: Implementation) -> None:
    """A state_dict pre-hook on a layer below a user class runs with the layer's prefix."""
    calls: list[tuple[object, ...]] = []
    model = network(impl)
    model.head[0].norm.register_state_dict_pre_hook(lambda *received: calls.append(received))
    model.state_dict()

    assert calls == [(model.head[0].norm, "head.0.norm.", False)]


def counter(impl: Implementation, value: object = 0):
    """Build a module that stores an extra object with its state."""

    class Counter(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.count = value
            self.received = []

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.received.append(state)
            self.count = state

    return Counter()


@for_each("value", [5, None, {"count": 5}, torch.ones(2)], ids=repr)
def test_extra_state_is_part_of_the_state_dict(impl: Implementation, value: object) -> None:
    """`state_dict` calls `get_extra_state` and stores what it returns, whatever it is."""
    model = impl.nn.Sequential(counter(impl, value), scaling(impl))
    state = model.state_dict()

    assert list(state) == ["0._extra_state", "1.factor"]
    assert state["0._extra_state"] is value


@for_each("value", [5, None, {"count": 5}, torch.ones(2)], ids=repr)
def test_extra_state_is_loaded(impl: Implementation, value: object) -> None:
    """`load_state_dict` calls `set_extra_state` once with the object from the state dict."""
    restored = impl.nn.Sequential(counter(impl), scaling(impl))
    restored.load_state_dict(
        impl.nn.Sequential(counter(impl, value), scaling(impl)).state_dict(),
    )

    assert len(restored[0].received) == 1
    assert restored[0].received[0] is value
    assert restored[0].count is value


def test_extra_state_goes_through_the_state_dict(impl: Implementation) -> None:
    """get_extra_state and set_extra_state carry a picklable object with the state."""

    class Counter(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    counter = Counter()
    counter.count = 5
    restored = Counter()
    result = restored.load_state_dict(counter.state_dict())

    assert repr(result) == "<All keys matched successfully>"
    assert restored.count == 5


def test_picklable_extra_state_can_be_saved(impl: Implementation) -> None:
    """A tensor as extra state goes through a file with the rest of the state."""
    file = io.BytesIO()
    torch.save(counter(impl, torch.tensor([5.0])).state_dict(), file)
    file.seek(0)
    restored = counter(impl)
    restored.load_state_dict(torch.load(file, weights_only=True))

    assert torch.equal(restored.count, torch.tensor([5.0]))


def test_other_extra_state_cannot_be_saved() -> None:
    """Extra state that cannot be pickled is in the state dict, but saving that fails."""

    def scenario(impl: Implementation) -> object:
        state = counter(impl, lambda: None).state_dict()
        assert callable(state["_extra_state"])
        torch.save(state, io.BytesIO())
        return state

    kind, _, text = same(scenario)

    assert kind == "raised"
    assert "local object" in text


@pytest.mark.parametrize("method", ["get_extra_state", "set_extra_state"])
def test_extra_state_needs_both_methods(method: str) -> None:
    """A module that implements only one of the two methods cannot load its own state."""

    def scenario(impl: Implementation) -> object:
        class Half(impl.nn.Module):
            pass

        setattr(Half, method, lambda *_: None)
        return Half().load_state_dict(Half().state_dict())

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert '"_extra_state"' in text


@pytest.mark.parametrize(
    ("method", "args"), [("get_extra_state", ()), ("set_extra_state", ({},))], ids=["get", "set"]
)
def test_extra_state_is_for_modules_that_implement_it(
    method: str, args: tuple[object, ...]
) -> None:
    """The methods of Module itself raise, and `state_dict` does not call them."""
    kind, error, _ = same(lambda impl: getattr(scaling(impl), method)(*args))

    assert (kind, error) == ("raised", "RuntimeError")
    assert same(lambda impl: list(scaling(impl).state_dict()))[0] == "returned"
