"""``EMA.rebind()`` adapts averages to a model that has changed, and errors before it say so."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.unit.averaging.recipes import layers, model_of, set_to


PRECISIONS = ["fp32", "fp64", "stochastic"]


def values(ema: "modkit.EMA[Any]") -> dict[str, Tensor]:
    """Return copies of the averages."""
    return {name: tensor.clone() for name, tensor in ema.named_averages()}


def add(model: nn.Sequential) -> None:
    """Add a layer."""
    model.append(nn.Linear(3, 3).to(model[0].weight.dtype))


CHANGES: dict[str, Callable[[Any], object]] = {
    "add": add,
    "remove": lambda model: model.__delitem__(4),
    "tie": lambda model: setattr(model[4], "weight", model[0].weight),
    "resize": lambda model: model.__setitem__(4, nn.Linear(3, 7).to(model[0].weight.dtype)),
}


@for_each("change", CHANGES)
@for_each("precision", PRECISIONS)
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_rebind(change: str, precision: Any, dtype: torch.dtype) -> None:
    """Known averages stay bitwise the same, new ones are copies, and those that are gone are dropped."""
    model = layers(dtype)
    ema = modkit.EMA(model, 0.5, precision=precision)
    for value in (1.0, 2.0, 4.0):
        set_to(model, value)
        ema.update()
    before = values(ema)
    CHANGES[change](model)
    with pytest.raises(NameMismatchError):
        ema.update()
    assert all(value.equal(before[name]) for name, value in values(ema).items())
    ema.rebind()
    rebound = values(ema)
    assert rebound.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        known = name in before and before[name].shape == parameter.shape
        assert rebound[name].equal(before[name] if known else parameter.to(rebound[name].dtype))
    ema.update()
    assert ema.n_averaged == 4
    with ema.applied():
        for name, parameter in model.named_parameters():
            assert parameter.equal(values(ema)[name].to(dtype))


# --- buffers ---------------------------------------------------------------------------------------


def test_copied_buffers_may_come_and_go() -> None:
    """A buffer that is gone is not an average that misses its place in the model."""
    model = layers()
    model.register_buffer("scale", torch.ones(2))
    ema = modkit.EMA(model)
    ema.update()
    del model.scale
    ema.update()
    assert "scale" not in values(ema)
    with ema.applied():
        pass
    model.register_buffer("shift", torch.ones(2))
    ema.update()
    assert values(ema)["shift"].eq(1.0).all()


# --- parameters that have other names ------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer beside which a small one is trained, as peft wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.adapter = nn.Linear(3, 3).to(base_layer.weight.dtype)


class Symmetric(nn.Module):
    """A parametrization that leaves the parameter as it is."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return a symmetric matrix."""
        return weight.triu() + weight.triu(1).t()


def adapt(model: nn.Sequential) -> dict[str, str]:
    """Wrap a layer; return new names with those of the same parameters before."""
    model[1] = Adapted(model[1])
    return {"1.base_layer.weight": "1.weight", "1.base_layer.bias": "1.bias"}


def parametrize(model: nn.Sequential) -> dict[str, str]:
    """Let a layer compute its weight."""
    nn.utils.parametrize.register_parametrization(model[1], "weight", Symmetric())
    return {"1.parametrizations.weight.original": "1.weight"}


def prune(model: nn.Sequential) -> dict[str, str]:
    """Mask a weight."""
    nn.utils.prune.l1_unstructured(model[1], "weight", 3)
    return {"1.weight_orig": "1.weight"}


def remove_in_the_middle(model: nn.Sequential) -> dict[str, str]:
    """Renumber the layers behind the one that is removed."""
    del model[1]
    return {f"{i}.{name}": f"{i + 1}.{name}" for i in (1, 2, 3) for name in ("weight", "bias")}


def insert(model: nn.Sequential) -> dict[str, str]:
    """Renumber all layers."""
    model.insert(0, nn.Linear(3, 3).to(model[0].weight.dtype))
    return {f"{i + 1}.{name}": f"{i}.{name}" for i in range(5) for name in ("weight", "bias")}


def exchange(model: nn.Sequential) -> dict[str, str]:
    """Exchange two layers."""
    model[0], model[1] = model[1], model[0]
    return {f"{1 - i}.{name}": f"{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}


RENAMES = [adapt, parametrize, prune, remove_in_the_middle, insert, exchange]
BEGINNINGS = ["updates", "loaded", "copied", "pickled"]


def begun(beginning: str, dtype: torch.dtype, **options: Any) -> "modkit.EMA[nn.Sequential]":
    """Return an EMA that lies between two states of its model."""
    ema = modkit.EMA(layers(dtype), [0.9, 0.99], seed=3, **options)
    for value in (1.0, 2.003, 3.001):
        set_to(ema.model, value)
        ema.update()
    # Each parameter has another value, and another average.
    with torch.no_grad():
        for index, parameter in enumerate(ema.model.parameters()):
            parameter.add_(index)
    ema.update()
    if beginning == "loaded":
        resumed = modkit.EMA(ema.model, [0.9, 0.99], seed=3, **options)
        resumed.load_state_dict(ema.state_dict())
        return resumed
    if beginning == "copied":
        return copy.deepcopy(ema)
    if beginning == "pickled":
        return pickle.loads(pickle.dumps(ema))
    return ema


@for_each("change", RENAMES)
@for_each("beginning", BEGINNINGS)
@for_each(
    ("precision", "dtype"),
    zip(PRECISIONS, [torch.float32, torch.bfloat16, torch.bfloat16], strict=True),
)
def test_averages_follow_parameters_to_other_names(
    change: Callable[[nn.Sequential], dict[str, str]],
    beginning: str,
    precision: Any,
    dtype: torch.dtype,
) -> None:
    """A parameter keeps its average; what is new starts as a copy."""
    ema = begun(beginning, dtype, precision=precision)
    states = copy.deepcopy(ema.state_dict()["averages"])
    known = {id(one) for one in ema.model.parameters()}
    renamed = change(ema.model)
    ema.rebind()

    now = dict(ema.model.named_parameters())
    for before, after in zip(states, ema.state_dict()["averages"], strict=True):
        assert after["tensors"].keys() == now.keys()
        for name, parameter in now.items():
            former = renamed.get(name, name)
            if id(parameter) in known:
                assert torch.equal(after["tensors"][name], before["tensors"][former])
            else:
                assert torch.equal(after["tensors"][name].to(dtype), parameter)
    first = ema.state_dict()["averages"][0]["tensors"]
    kept = [name for name, parameter in now.items() if id(parameter) in known]
    # A copy of the parameter would be something else.
    assert not any(torch.equal(first[name].to(dtype), now[name]) for name in kept)
    ema.update()
    assert ema.n_averaged == 5


ORIGINAL = "1.parametrizations.weight.original"
utils, parametrizations = nn.utils, nn.utils.parametrizations


def without_result(layer: nn.Module) -> None:
    """Remove a parametrization and keep the parameter as it was trained."""
    utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def with_result(layer: nn.Module) -> None:
    """Remove a parametrization and write its result into the parameter."""
    utils.parametrize.remove_parametrizations(layer, "weight")


# A function that registers, and the name that then keeps the average, or None for a copy; a function
# that removes, and the name whose average the weight then keeps, or None for a copy.
WRAPPERS: list[tuple[Any, str | None, Any, str | None]] = [
    (utils.weight_norm, None, utils.remove_weight_norm, None),
    (parametrizations.weight_norm, None, with_result, None),
    (utils.spectral_norm, "1.weight_orig", utils.remove_spectral_norm, None),
    (parametrizations.spectral_norm, ORIGINAL, with_result, None),
    (parametrizations.orthogonal, None, with_result, None),
    (
        lambda layer: utils.parametrize.register_parametrization(layer, "weight", Symmetric()),
        ORIGINAL,
        without_result,
        ORIGINAL,
    ),
    (
        lambda layer: utils.parametrize.register_parametrization(layer, "weight", Symmetric()),
        ORIGINAL,
        with_result,
        None,
    ),
    (
        lambda layer: utils.prune.l1_unstructured(layer, "weight", 3),
        "1.weight_orig",
        lambda layer: utils.prune.remove(layer, "weight"),
        None,
    ),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@for_each(("register", "kept", "remove", "kept_after"), WRAPPERS)
def test_wrappers_of_torch_come_and_go(
    register: Any, kept: str | None, remove: Any, kept_after: str | None
) -> None:
    """A weight keeps its average while it holds the values that were averaged, under any name."""
    ema = begun("updates", torch.float32)
    model = ema.model
    before = values(ema)
    register(model[1])
    model(torch.ones(1, 3))
    ema.rebind()
    wrapped = values(ema)
    if kept is not None:
        assert torch.equal(wrapped[kept], before["1.weight"])
    added = {name for name, _ in model.named_parameters()} - before.keys() - {kept}
    assert all(torch.equal(wrapped[name], model.get_parameter(name)) for name in added)
    ema.update()

    wrapped = values(ema)
    remove(model[1])
    ema.rebind()
    found = values(ema)
    copied = model[1].weight if kept_after is None else wrapped[kept_after]
    assert torch.equal(found["1.weight"], copied)
    # Each of the other averages has gone on.
    for name in before.keys() - {"1.weight"}:
        assert torch.equal(found[name], wrapped[name])
    ema.update()
    assert ema.n_averaged == 6


def test_parameters_that_were_renumbered_and_moved_start_again() -> None:
    """Without a sign that it is the same tensor, a parameter does not get the average of another."""
    ema = begun("updates", torch.float32)
    before = values(ema)
    del ema.model[1]
    for parameter in ema.model.parameters():
        parameter.data = parameter.data.clone()
    ema.rebind()
    found = values(ema)

    assert torch.equal(found["0.weight"], before["0.weight"])
    for index in (1, 2, 3):
        assert torch.equal(found[f"{index}.weight"], ema.model[index].weight)


def test_rebind_lets_go_of_what_the_model_has_lost() -> None:
    """Removed parameters are not kept alive once the averages are adapted."""
    ema = begun("updates", torch.float32)
    lost = weakref.ref(ema.model[4].weight)
    del ema.model[4]
    ema.rebind()
    ema.update()
    gc.collect()
    assert lost() is None


def test_a_parameter_that_is_frozen_later_is_averaged_still() -> None:
    """So it is after a resume, in a model where it is frozen from the beginning."""
    model = layers()
    ema = modkit.EMA(model, 0.5, trainable_only=True)
    set_to(model, 0.0)
    ema.update()
    model[0].requires_grad_(False)
    set_to(model, 4.0)
    ema.update()
    assert all(value.eq(2.0).all() for value in values(ema).values())
    resumed = modkit.EMA(model, 0.5, trainable_only=True)
    resumed.load_state_dict(ema.state_dict())
    resumed.update()
    assert len(values(resumed)) == 10
    assert all(value.eq(3.0).all() for value in values(resumed).values())


def test_the_copy_of_a_buffer_that_was_tied_stays_until_the_next_update() -> None:
    """After `rebind()` a copied buffer is there under a name that it shares by now."""
    model = model_of([1.0])
    model.register_buffer("first", torch.ones(1))
    model.register_buffer("second", torch.zeros(1))
    ema = modkit.EMA(model)
    ema.update()
    model.second = model.first
    ema.rebind()

    assert sorted(ema.state_dict()["buffers"]) == ["first", "second"]
