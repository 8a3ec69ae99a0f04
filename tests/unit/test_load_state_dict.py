import copy

import pytest
import torch

import modkit
import modkit.migrations
import modkit.nn


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.ModuleList([torch.nn.GRU(3, 1)])
    )


def other_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Make a state dict for ``module`` whose values differ from it in each entry."""
    return {name: tensor + 1 for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
def test_loads_what_torch_loads(assign: bool) -> None:
    """A model of torch gets the values, the result and the identities that torch's method gives."""
    ours, theirs = network(), network()
    state = other_values(ours)

    result = modkit.load_state_dict(ours, copy.deepcopy(state), assign=assign)
    expected = theirs.load_state_dict(copy.deepcopy(state), assign=assign)

    assert result == expected
    assert type(result) is type(expected)
    for (name, mine), (other, its) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, its)
        assert type(mine) is type(its)
        assert mine.requires_grad == its.requires_grad


def test_a_refused_load_changes_nothing() -> None:
    """An entry that does not fit is found before the first write, with torch's error."""
    model, twin = network(), network()
    before = copy.deepcopy(model.state_dict())
    state = {**other_values(model), "2.0.bias_hh_l0": torch.zeros(1), "stray": torch.zeros(1)}
    with pytest.raises(RuntimeError) as expected:
        twin.load_state_dict(state)

    with pytest.raises(RuntimeError) as caught:
        modkit.load_state_dict(model, state)

    assert str(caught.value) == str(expected.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_override_of_the_model_is_called() -> None:
    """A model with a ``load_state_dict`` of its own loads by that."""

    class Wrapped(torch.nn.Module):
        def load_state_dict(self, state_dict, strict=True, assign=False):
            return ("own", strict, assign)

    assert modkit.load_state_dict(Wrapped(), {}, strict=False, assign=True) == ("own", False, True)


@pytest.mark.parametrize("base", [modkit.nn.Module, torch.nn.Module], ids=["modkit", "torch"])
def test_an_override_without_assign_is_called(base: type[torch.nn.Module]) -> None:
    """A ``load_state_dict`` of fewer arguments gets those that differ from their defaults alone."""

    class Old(base):
        def load_state_dict(self, state_dict, strict=True):
            return ("own", strict)

    class Older(base):
        def load_state_dict(self, state_dict):
            return ("own", state_dict)

    assert modkit.load_state_dict(Old(), {}) == ("own", True)
    assert modkit.load_state_dict(Old(), {}, strict=False) == ("own", False)
    assert modkit.load_state_dict(Older(), {}) == ("own", {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'strict'"):
        modkit.load_state_dict(Older(), {}, strict=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'assign'"):
        modkit.load_state_dict(Old(), {}, assign=True)


@pytest.mark.parametrize("model", [None, {"weight": torch.ones(1)}, torch.nn.Linear])
def test_what_is_not_a_module(model: object) -> None:
    """The error names the function and what it was given."""
    with pytest.raises(
        TypeError, match=r"modkit.load_state_dict\(\): model must be a torch.nn.Module, got"
    ):
        modkit.load_state_dict(model, {})


def test_classes_with_a_constructor_of_their_own() -> None:
    """A layer that brings an old checkpoint up to date may be of a class with a ``__new__``."""

    class Norm(torch.nn.BatchNorm1d):
        def __new__(cls, size):
            return super().__new__(cls)

    model = torch.nn.Sequential(Norm(2))
    state = {name: value + 1 for name, value in model.state_dict().items() if "num" not in name}
    modkit.load_state_dict(model, state)

    assert model[0].weight.tolist() == [2.0, 2.0]
    assert model[0].num_batches_tracked.item() == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_assigned_buffers_say_whether_they_are_persistent(persistent: bool) -> None:
    """A ``Buffer`` in the state dict decides that, as when it is assigned to an attribute."""
    ours, theirs = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    for module, load in (
        (ours, modkit.load_state_dict),
        (theirs, torch.nn.Module.load_state_dict),
    ):
        state = dict(module.state_dict())
        state["running_mean"] = torch.nn.Buffer(torch.ones(2), persistent=persistent)
        load(module, state, assign=True)

    assert ours.running_mean.tolist() == [1.0, 1.0]
    assert ours._non_persistent_buffers_set == theirs._non_persistent_buffers_set
    assert ("running_mean" in ours.state_dict()) is persistent


class Name(str):
    """A name in a state dict that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def startswith(self, *args):
        """Count a look at the beginning."""
        Name.looks += 1
        return super().startswith(*args)


@pytest.mark.parametrize("stray", [False, True])
def test_siblings_take_linear_time(stray: bool) -> None:
    """Each key is looked at a few times, however many layers stand side by side."""
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(300))
    state = {Name(name): tensor for name, tensor in model.state_dict().items()}
    if stray:
        state[Name("7.stray")] = torch.ones(1)
    Name.looks = 0
    modkit.load_state_dict(model, state, strict=not stray)

    assert Name.looks <= 4 * len(state)


class Derived(torch.nn.BatchNorm1d):
    """A layer that inherits its loader."""


def own_loader() -> torch.nn.Module:
    """Make a layer whose class migrates, so that modules load one after the other."""

    @modkit.migrations.declare({3: [modkit.migrations.rename("gamma", "weight")]})
    class Declared(torch.nn.BatchNorm1d):
        pass

    return Declared(1)


LAYERS = {
    "batch norm": lambda: torch.nn.BatchNorm1d(1),
    "nested": lambda: torch.nn.Sequential(torch.nn.BatchNorm2d(1)),
    "derived": lambda: Derived(1),
    "synchronized": lambda: torch.nn.SyncBatchNorm(1),
    "instance norm": lambda: torch.nn.InstanceNorm1d(1, affine=True, track_running_stats=True),
    "declared": own_loader,
}
LOADS = {
    "method": lambda model, state: model.load_state_dict(state),
    "function": modkit.load_state_dict,
    "not strict": lambda model, state: modkit.load_state_dict(model, state, strict=False),
    "matching": modkit.load_matching,
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("layer", LAYERS)
def test_plain_dicts_take_linear_time(layer: str, load: str) -> None:
    """Without versions, each layer looks at its own names: twice as many layers, twice the looks."""
    looks = []
    for count in (40, 80):
        model = modkit.nn.Module()
        model.layers = torch.nn.ModuleList(LAYERS[layer]() for _ in range(count))
        state = {Name(name): tensor + 1 for name, tensor in model.state_dict().items()}
        Name.looks = 0
        LOADS[load](model, state)
        looks.append(Name.looks)

        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert looks[1] <= 2 * looks[0] + 100
