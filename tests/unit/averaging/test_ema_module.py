"""``EMA.module`` and calling an ``EMA``: a model that stays at the average."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import PRECISIONS, network, set_to, sgd, train


def check(ema: "modkit.EMA[Any]") -> None:
    """Compare ``module`` with a copy that is made now, bit by bit, and its outputs with ``applied()``."""
    expected = ema.averaged_model()
    module = ema.module
    assert ema.module is module
    found = module.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor), name
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    batch = torch.ones(3, 4, dtype=next(ema.model.parameters()).dtype)
    training = ema.model.training
    with ema.applied(), torch.no_grad():
        outputs = ema.model.eval()(batch)
    ema.model.train(training)
    assert ema(batch).equal(outputs)


@for_each("precision", PRECISIONS)
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_module_follows(precision: Any, dtype: torch.dtype) -> None:
    """Before the first update it is at the training weights, and then at the average."""
    model = network(dtype)
    optimizer = sgd(model)
    ema = modkit.EMA(model, 0.9, precision=precision)
    check(ema)
    train(model, optimizer, 0, 1)
    check(ema)
    for step in range(1, 4):
        ema.update()
        check(ema)
        train(model, optimizer, step, step + 1)


def change_back(ema: "modkit.EMA[Any]") -> None:
    """Load an earlier state."""
    state = copy.deepcopy(ema.state_dict())
    train(ema.model, sgd(ema.model), 5, 6)
    ema.update()
    ema.load_state_dict(state)


def start_anew(ema: "modkit.EMA[Any]") -> None:
    """Forget the averages."""
    with pytest.warns(UserWarning, match="starts anew"):
        ema.load_state_dict({})


def grow(ema: "modkit.EMA[Any]") -> None:
    """Add a layer."""
    ema.model.append(nn.Linear(2, 2))
    ema.rebind()


@for_each("precision", PRECISIONS)
@for_each("made", ["before", "inside"])
@for_each("updates", [0, 2])
def test_an_averaged_model_from_inference_mode_can_be_trained(
    precision: Any, made: str, updates: int
) -> None:
    """`averaged_model()` returns ordinary tensors, also of a model that was built in inference mode."""
    with torch.inference_mode(made == "inside"):
        ema = modkit.EMA(network(), 0.5, precision=precision)
        for _ in range(updates):
            ema.update()
    with torch.inference_mode():
        averaged = ema.averaged_model()
    averaged.requires_grad_(True).train()
    before = averaged[0].weight.detach().clone()
    train(averaged, sgd(averaged), 0, 1)

    assert not any(one.is_inference() for one in (*averaged.parameters(), *averaged.buffers()))
    assert all(parameter.grad is not None for parameter in averaged.parameters())
    assert averaged[0].weight.ne(before).any()


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")
@for_each("compiled", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(3, 4))])
def test_models_of_torchscript_can_be_averaged(compiled: Callable[[Any], Any]) -> None:
    """A scripted module has no `requires_grad_()`; its copies need no gradients all the same."""
    model = nn.Sequential(nn.Linear(4, 2))
    ema = modkit.EMA(compiled(model), 0.5)
    ema.update()
    copies = ema.averaged_model(), ema.module

    assert all(one(torch.ones(3, 4)).equal(model(torch.ones(3, 4))) for one in copies)
    assert not any(one.training or any(p.requires_grad for p in one.parameters()) for one in copies)


# --- references ------------------------------------------------------------------------------------


def from_the_start(ema: "modkit.EMA[Any]") -> None:
    """Forget the averages, and begin again."""
    start_anew(ema)
    ema.update()


def reshape_buffer(ema: "modkit.EMA[Any]") -> None:
    """Give a buffer another shape, for which the copy of the average is made anew."""
    ema.model.cache = torch.arange(5)
    ema.update()


def share_memory(ema: "modkit.EMA[Any]") -> None:
    """Move the averages to shared memory."""
    for _, tensor in ema.named_averages():
        tensor.share_memory_()


EVENTS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda ema: None,
    "an earlier state": change_back,
    "from the start": from_the_start,
    "rebind": lambda ema: ema.rebind(),
    "reshape a buffer": reshape_buffer,
    "share memory": share_memory,
}


@for_each("event", EVENTS)
@for_each("taken", [0, 3])
@for_each("options", [{}, {"buffers": "average"}, {"precision": "same", "device": "cpu"}])
def test_a_reference_follows(event: str, taken: int, options: Any) -> None:
    """A module taken at any time, also before the first update, holds the average at all later times."""
    model = network()
    model.register_buffer("cache", torch.arange(3))
    optimizer = sgd(model)
    ema = modkit.EMA(model, 0.9, **options)
    for step in range(6):
        if step == taken:
            reference = ema.module
        train(model, optimizer, step, step + 1)
        ema.update()
        if step == 3:
            EVENTS[event](ema)
        if step >= taken:
            expected = ema.averaged_model().state_dict()

            assert freeze(reference.state_dict()) == freeze(expected)

    assert ema.module is reference


def test_a_reference_to_forgotten_averages_has_memory_of_its_own() -> None:
    """Before the next first update it holds the training weights of that moment, and shares nothing."""
    model = network()
    ema = modkit.EMA(model, 0.5)
    set_to(model, 1.0)
    ema.update()
    reference = ema.module
    state = ema.state_dict()
    set_to(model, 2.0)
    start_anew(ema)
    held = [parameter.clone() for parameter in reference.parameters()]
    set_to(reference, 7.0)

    assert all(one.eq(2.0).all() for one in held)
    assert all(one.eq(1.0).all() for one in state["averages"][0]["tensors"].values())
    assert all(one.eq(2.0).all() for one in model.parameters())


def test_a_model_of_another_structure_has_another_module() -> None:
    """An earlier reference stays as it is, and gradients still flow through it."""
    model = network()
    ema = modkit.EMA(model, 0.5)
    ema.update()
    reference = ema.module
    before = copy.deepcopy(reference.state_dict())
    grow(ema)
    train(model, sgd(model), 0, 1)
    ema.update()

    assert ema.module is not reference
    assert len(reference) == 4
    assert all(value.equal(before[name]) for name, value in reference.state_dict().items())
    batch = torch.ones(3, 4, requires_grad=True)
    reference(batch).sum().backward()
    assert batch.grad is not None
    check(ema)


def test_the_mode_of_the_module_is_kept() -> None:
    """`module.train()` holds for later accesses and updates."""
    model = network()
    ema = modkit.EMA(model, 0.5)
    ema.module.train()
    ema.update()

    assert ema.module.training
    assert not ema.averaged_model().training
