"""Each method checks that the model has what is averaged, and names mistakes that are silent else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modkit
import modkit.distributed
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.unit.averaging.recipes import gradients, network, same_state, set_to, state_of


def enter(block: Any) -> None:
    """Begin and end a block."""
    with block:
        pass


def by_hooks(callback: Any) -> None:
    """Evaluate between two hooks."""
    callback.on_validation_start()
    callback.on_validation_end()


# Calls of a user with the model in training, a wrapper or a copy of it.
OWN: dict[str, Callable[[Any], object]] = {
    "update": lambda callback: callback.step(),
    "applied": lambda callback: enter(callback.ema.applied()),
    "evaluating": lambda callback: enter(callback.evaluating()),
    "hooks": by_hooks,
    "copy_to": lambda callback: callback.ema.copy_to(),
    "module": lambda callback: callback.ema.module,
    "call": lambda callback: callback.ema(torch.ones(1, 4)),
    "averaged_model": lambda callback: callback.ema.averaged_model(),
    "update_bn": lambda callback: callback.ema.update_bn([torch.randn(4, 4)]),
}
OTHER: dict[str, Callable[[Any, nn.Module], object]] = {
    "update": lambda ema, model: ema.update(model),
    "applied": lambda ema, model: enter(ema.applied(model)),
    "copy_to": lambda ema, model: ema.copy_to(model),
}
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "gained": (lambda net: net.append(nn.Linear(2, 2)), "2 unexpected: 4.weight, 4.bias"),
    "lost": (lambda net: net.__delitem__(3), "2 missing: 3.weight, 3.bias"),
    "gained a buffer": (
        lambda net: net.append(nn.BatchNorm1d(2, affine=False)),
        "2 unexpected: 4.running_mean, 4.running_var",
    ),
    "unfrozen": (
        lambda net: net[0].requires_grad_(True),
        r"2 unexpected: 0\.weight, 0\.bias\. .*require gradients now.* call EMA\.rebind\(\)",
    ),
}


def begun(**options: Any) -> "modkit.EMACallback[nn.Module]":
    """Return averages of a network whose first layer is frozen."""
    net = network()
    net[0].requires_grad_(False)
    callback = modkit.EMACallback(net, None, 0.5, trainable_only=True, buffers="average", **options)
    # Callbacks follow what their loop unfreezes; here it is an error, as for ``EMA`` alone.
    callback.ema._engine.follows_unfrozen = False
    callback.step()
    set_to(net, 1.0)
    callback.step()
    return callback


@for_each("change", CHANGES)
@for_each("call", OWN)
@for_each("is_paired", [False, True])
def test_a_changed_model_is_refused_everywhere(change: str, call: str, is_paired: bool) -> None:
    """Nothing has changed then, and `rebind()` takes the model as it is."""
    callback = begun()
    if is_paired:
        enter(callback.evaluating())
        callback.ema.averaged_model()
    alter, message = CHANGES[change]
    alter(callback.model)
    before, averages = state_of(callback.model), copy.deepcopy(callback.state_dict())
    for _ in range(2):
        with pytest.raises(NameMismatchError, match=rf"{message}.*averages are unchanged"):
            OWN[call](callback)

    assert same_state(callback.model, before)
    assert str(callback.state_dict()) == str(averages)
    callback.ema.rebind()
    callback.step()
    OWN[call](callback)


@for_each("call", [call for call in OWN if call != "to"])
def test_a_callback_follows_what_is_unfrozen_alone(call: str) -> None:
    """Layers that are new, in its model or in another one, are an error all the same."""
    callback = begun()
    callback.ema._engine.follows_unfrozen = True
    callback.model[0].requires_grad_(True)
    OWN[call](callback)
    assert "0.weight" in dict(callback.ema.named_averages())

    other = copy.deepcopy(callback.model)
    for model in other, callback.model:
        model.append(nn.Linear(2, 2))
    for read in OTHER.values():
        with pytest.raises(NameMismatchError, match=CHANGES["gained"][1]):
            read(callback.ema, other)
    with pytest.raises(NameMismatchError, match=CHANGES["gained"][1]):
        OWN[call](callback)


@for_each("call", OTHER)
@for_each("wrapped", [False, True])
def test_what_trains_is_a_matter_of_the_tracked_model(call: str, wrapped: bool) -> None:
    """Another model may be frozen as a whole, or train all that it has."""
    ema = begun().ema
    for trains in False, True:
        other = copy.deepcopy(ema.model).requires_grad_(trains)
        OTHER[call](ema, nn.ModuleDict({"net": other}) if wrapped else other)


@for_each("options", [{"include": ["1.*", "3.*"]}, {"exclude": "4.*"}])
@for_each("call", OWN)
def test_what_is_left_out_may_come(options: dict[str, Any], call: str) -> None:
    """A layer that the options do not select is not averaged."""
    net = nn.Sequential(*network(), nn.Linear(2, 2))
    callback = modkit.EMACallback(net, None, 0.5, **options)
    callback.step()
    net[4] = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[4].requires_grad_(False)

    OWN[call](callback)


@for_each("call", OWN)
def test_before_the_first_update_a_model_may_change(call: str) -> None:
    """There is nothing yet that would not fit."""
    callback = modkit.EMACallback(network(), None, 0.5)
    callback.model.append(nn.Linear(2, 2))
    if call != "update_bn":
        OWN[call](callback)
    callback.step()
    OWN[call](callback)


# --- averages that are never updated, and parameters that are kept elsewhere -------------------

READS: dict[str, Callable[[Any], object]] = {
    name: read for name, read in OWN.items() if name not in {"update", "update_bn", "to"}
}


def steps(net: nn.Module, foreach: bool, count: int = 10) -> None:
    """Train."""
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    for number in range(count):
        gradients(net, number)
        optimizer.step()


@for_each("read", READS)
@for_each("kind", ["new", "foreach", "resumed"])
def test_an_average_that_is_never_updated_is_noticed_once(read: str, kind: str) -> None:
    """The warning says what to call, at the line that reads the average."""
    callback = modkit.EMACallback(network(), None)
    if kind == "resumed":
        source = modkit.EMA(callback.model)
        source.update()
        callback.load_state_dict(source.state_dict())
    READS[read](callback)
    steps(callback.model, foreach=kind == "foreach")
    with pytest.warns(UserWarning, match=r"no update, but .* attach\(\) the optimizer") as caught:
        READS[read](callback)
    assert [warning.filename for warning in caught] == [__file__]
    for other in READS.values():
        other(callback)


@for_each("read", READS)
def test_what_is_no_training_is_not_taken_for_one(read: str) -> None:
    """Loading, initializing, a delayed start, a resume, and a copy are not."""
    delayed, resumed = (
        modkit.EMACallback(network(), None, update_after_step=after) for after in (5, 0)
    )
    delayed.step()
    steps(delayed.model, foreach=True)
    READS[read](delayed)

    resumed.model.load_state_dict(network().state_dict())
    set_to(resumed.model, 1.0)
    READS[read](resumed)
    state = modkit.EMA(resumed.model).state_dict()
    steps(resumed.model, foreach=True)
    resumed.load_state_dict(state)
    READS[read](resumed)
    READS[read](copy.deepcopy(resumed))


def of_another_shape(model: nn.Module) -> None:
    """Give a buffer another shape."""
    model.mean = torch.zeros(3)


def of_another_dtype(model: nn.Module) -> None:
    """Give a buffer another dtype."""
    model.mean = torch.zeros(2, dtype=torch.float64)


def without_a_buffer(model: nn.Module) -> None:
    """Leave a place empty."""
    model.mean = None


def as_it_was(model: nn.Module) -> None:
    """Change nothing."""


@for_each("change", [of_another_shape, of_another_dtype, without_a_buffer, as_it_was])
@for_each("first", ["taken", "skipped", "unfrozen"])
def test_models_may_be_averaged_in_turn(change: Callable[[nn.Module], None], first: str) -> None:
    """Cached plans notice what an update with another model makes anew."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("mean", torch.zeros(2))
    model[1].requires_grad_(first != "unfrozen")
    other = copy.deepcopy(model)
    change(other)
    callback = modkit.EMACallback(model, None, 0.5, trainable_only=True, on_nonfinite="skip")
    ema = callback.ema
    set_to(model, float("nan") if first == "skipped" else 1.0)
    set_to(other, 1.0)
    ema.update()
    ema.update(other)
    if first == "unfrozen":
        # Without this average, both models have been seen.
        model[1].requires_grad_(True)
        ema.update()

    for trained, value in ((model, 3.0), (other, 4.0), (model, 5.0)):
        before = {name: tensor.clone() for name, tensor in ema.named_averages()}
        set_to(trained, value)
        if trained.mean is not None:
            trained.mean.fill_(value)
        ema.update(trained)

        after = dict(ema.named_averages())
        mean = after.pop("mean", None)
        assert trained.mean is None or torch.equal(mean, trained.mean)
        assert len(after) == 4
        for name, tensor in after.items():
            assert torch.equal(tensor, (before[name] + value) / 2), name
