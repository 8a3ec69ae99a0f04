"""Copies of averages: complete and apart, or refused where the model holds an average."""

import copy
import io
import multiprocessing.reduction
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import dill
import pytest
import torch
from torch import Tensor, nn

import modkit
from tests.cases import for_each
from tests.unit.averaging.recipes import gradients, network, sgd


def through_a_file(value: Any) -> Any:
    """Save with torch, which saves each storage once."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_a_process(value: Any) -> Any:
    """Pickle as for a spawned process, which moves the tensors of the sender to shared memory."""
    return pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(value))


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
    "dill": lambda value: dill.loads(dill.dumps(value)),
    "torch.save": through_a_file,
    "spawn": through_a_process,
}


@contextmanager
def copied_to(callback: Any) -> Iterator[None]:
    """Copy the average into the model and out again."""
    callback.ema.store()
    callback.ema.copy_to()
    yield
    callback.ema.restore()


@contextmanager
def hooks(callback: Any) -> Iterator[None]:
    """Evaluate between two hooks."""
    callback.on_validation_start()
    yield
    callback.on_validation_end()


@contextmanager
def outside(_: Any) -> Iterator[None]:
    """Evaluate nothing."""
    yield


PLACES: dict[str, Callable[[Any], Any]] = {
    "outside": outside,
    "applied": lambda callback: callback.ema.applied(),
    "evaluating": lambda callback: callback.evaluating(),
    "copy_to": copied_to,
    "hooks": hooks,
}
POLICIES: dict[str, Any] = {
    "copy": "copy",
    "average": "average",
    "ignore": "ignore",
    "by name": {"*mean": "average", "*": "copy"},
}


def trained(policy: str) -> "modkit.EMACallback[nn.Module]":
    """Return averages of a network with BatchNorm that has taken a few steps."""
    net = network()
    optimizer = sgd(net)
    callback = modkit.EMACallback(net, None, [0.5, 0.9], buffers=POLICIES[policy])
    step(callback, optimizer, 0, 3)
    return callback


def step(callback: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Train."""
    for number in range(first, last):
        gradients(callback.model, number)
        optimizer.step()
        callback.step()


def tensors_of(callback: Any) -> dict[str, Tensor]:
    """Return the tensors of the model and of all averages, by place."""
    found = {f"model {name}": tensor for name, tensor in callback.model.state_dict().items()}
    for index in range(2):
        for name, tensor in callback.ema.named_averages(index):
            found.setdefault(f"copy {name}", tensor)
            if tensor is not found[f"copy {name}"]:
                found[f"average {index} {name}"] = tensor
    return found


def values_of(callback: Any) -> dict[str, Tensor]:
    """Return copies of all tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(callback).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Compare values by name."""
    return first.keys() == second.keys() and all(first[n].equal(t) for n, t in second.items())


@for_each("policy", POLICIES)
@for_each("way", WAYS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with its model"])
def test_a_copy_is_complete(way: str, policy: str, beside: bool) -> None:
    """It goes on bitwise as the original does, which the copy leaves alone."""
    callback = trained(policy)
    expected = values_of(callback)
    if beside:
        other = WAYS[way]({"model": callback.model, "callback": callback})["callback"]
    else:
        other = WAYS[way](callback)

    assert equal(values_of(other), expected)
    assert equal(values_of(callback), expected)
    assert len({tensor.data_ptr() for tensor in tensors_of(other).values()}) == len(expected)
    for one in callback, other:
        step(one, sgd(one.model), 3, 5)
    assert equal(values_of(other), values_of(callback))
    assert not equal(values_of(other), expected)
    with other.evaluating():
        inside = {name: tensor.clone() for name, tensor in other.model.named_parameters()}
    assert equal(inside, {name: dict(other.ema.named_averages())[name] for name in inside})


@for_each("place", [place for place in PLACES if place != "outside"])
@for_each("way", WAYS)
def test_a_copy_is_refused_where_the_model_holds_an_average(way: str, place: str) -> None:
    """The error says what to take, and the run goes on."""
    callback = trained("copy")
    expected = values_of(callback)
    with PLACES[place](callback):
        with pytest.raises(RuntimeError, match=r"Copy it outside, or take its state_dict\(\)"):
            WAYS[way](callback)
        assert "raw" in copy.deepcopy(callback.ema.state_dict())

    assert equal(values_of(callback), expected)


@for_each("place", ["applied", "evaluating", "hooks"])
def test_memory_that_is_shared_inside_is_not_a_write(place: str) -> None:
    """Workers may evaluate the model of a block: sharing moves its memory, and no value changes."""
    callback = trained("copy")
    expected = values_of(callback)
    with PLACES[place](callback):
        callback.model.share_memory()
        through_a_process(callback.model)

    assert equal(values_of(callback), expected)
    step(callback, sgd(callback.model), 3, 4)
    with pytest.raises(RuntimeError, match="written to inside"), callback.evaluating():
        callback.model.share_memory()
        nn.init.zeros_(callback.model[0].weight)


@for_each("place", PLACES)
def test_a_shallow_copy_is_refused(place: str) -> None:
    """It would share the averages and the model, which keep what they hold in a block."""
    callback = trained("copy")
    expected = values_of(callback)
    with PLACES[place](callback):
        inside = values_of(callback)
        with pytest.raises(TypeError, match=r"Use copy\.deepcopy\(\(model, ema\)\)"):
            copy.copy(callback.ema)
        assert equal(values_of(callback), inside)
    assert equal(values_of(callback), expected)
