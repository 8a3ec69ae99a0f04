"""Operations on the sharded state of a network."""

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed.averages.networks import whole
from tests.distributed.state.networks import (
    SPREAD,
    frozen,
    network,
    optimizer_of,
    shard,
    steps,
)
from tests.helpers import MODKIT, TORCH, Implementation


Scenario = Callable[[Implementation, Path], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Enter a function into the table."""
    SCENARIOS[function.__name__] = function
    return function


def trained(impl: Implementation, spread: str = "fsdp") -> Any:
    """Return a network that is spread and has learned for three steps, and its optimizer."""
    model = SPREAD[spread](network(impl))
    optimizer = optimizer_of(model)
    steps(model, optimizer, range(3))
    return model, optimizer


# How it is put into a network.


@scenario
def whole_state_is_split_up(impl: Implementation, folder: Path) -> Any:
    """Each process has the whole state, and takes its part of it."""
    found = []
    options = StateDictOptions(full_state_dict=True)
    for spread in SPREAD:
        model, _ = trained(impl, spread)
        state = get_model_state_dict(model, options=options)
        other = SPREAD[spread](network(impl, 1))
        keys = set_model_state_dict(other, state, options=options)
        assert frozen(other.state_dict()) == frozen(model.state_dict())
        found.append((frozen(other.state_dict()), str(keys)))
    return found


@scenario
def one_process_gives_all_the_state(impl: Implementation, folder: Path) -> Any:
    """Only the first process has it, and the network of the others may have no memory yet."""
    found = []
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    giving = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for device in ("cpu", "meta"):
        model, _ = trained(impl)
        state = get_model_state_dict(model, options=options)
        assert bool(state) == (dist.get_rank() == 0)
        with torch.device(device):
            other = shard(network(impl, 1))
        if device == "meta":
            # These two are not saved, or have no shards to be made of.
            other.mask = torch.ones(7)
        set_model_state_dict(other, state, options=giving)
        found.append(frozen(other.state_dict()))
        assert found[-1] == frozen(model.state_dict())
        assert not any(tensor.is_meta for tensor in other.parameters())
    return found


@scenario
def parts_are_put_in_place(impl: Implementation, folder: Path) -> Any:
    """A network without memory takes the parts of a whole state as its parameters."""
    full = whole(dict(trained(impl)[0].state_dict()))
    with torch.device("meta"):
        model = shard(network(impl, 1))
    members = model.state_dict()
    state = {
        key: distribute_tensor(value, members[key].device_mesh, members[key].placements)
        if isinstance(members[key], DTensor)
        else value
        for key, value in full.items()
    }
    keys = model.load_state_dict(state, strict=True, assign=True)
    model.mask = torch.ones(7)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())
    result = frozen(model.state_dict())
    return result, str(keys), steps(model, optimizer_of(model), range(3))


@scenario
def memory_comes_late(impl: Implementation, folder: Path) -> Any:
    """Build on the meta device, shard, allocate, initialize and load, as torchtitan does."""
    saved, _ = trained(impl)
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder / f"late-{impl}")
    with torch.device("meta"):
        model = shard(network(impl, 1))
    assert all(tensor.is_meta for tensor in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.mask.fill_(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder / f"late-{impl}")
    set_model_state_dict(model, state["model"])
    result = frozen(model.state_dict())
    assert result == frozen(saved.state_dict())
    return result, steps(model, optimizer_of(model), range(3))


@scenario
def casts_keep_parts(impl: Implementation, folder: Path) -> Any:
    """A cast of the network casts the parts, and a move to where they are does nothing."""
    model = shard(network(impl))
    before = [id(parameter) for parameter in model.parameters()]
    model.to("cpu").float()
    assert [id(parameter) for parameter in model.parameters()] == before
    model.double()
    return frozen(model.state_dict()), steps(model, optimizer_of(model), range(2))


# Old versions, and what does not fit.


@scenario
def old_versions_are_migrated(impl: Implementation, folder: Path) -> Any:
    """A state of old versions of two classes loads into parts of today."""
    model, _ = trained(impl)
    state = model.state_dict()
    assert state._metadata["scaled"]["version"] == 2
    state._metadata["scaled"]["version"] = state._metadata["norm"]["version"] = 1
    state["scaled.scale"] = state.pop("scaled.gain")
    del state["norm.num_batches_tracked"]
    other = shard(network(impl, 1))
    keys = other.load_state_dict(state)
    now, then = other.state_dict(), model.state_dict()
    assert frozen(now["scaled.gain"]) == frozen(then["scaled.gain"])
    return frozen(now), str(keys)


def refusal(action: Callable[[], Any]) -> tuple[str, str] | None:
    """Return what an action raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@scenario
def what_does_not_fit(impl: Implementation, folder: Path) -> Any:
    """Collect the errors of loading shards, and of loading full tensors into shards."""
    texts = []
    options = StateDictOptions(full_state_dict=True)
    for change in ({"body.0.weight": None}, {"other": (2,)}, {"body.0.weight": (3, 3)}):
        model, _ = trained(impl)
        state = get_model_state_dict(model, options=options)
        for key, shape in change.items():
            if shape is None:
                del state[key]
            else:
                state[key] = torch.ones(shape)
        texts.append(refusal(lambda: model.load_state_dict(state)))
        texts.append(refusal(lambda: set_model_state_dict(model, dict(state), options=options)))
    assert any(texts)
    return texts


def outcome(function: Scenario, impl: Implementation, folder: Path) -> dict[str, Any]:
    """Do it; return what came of it, or the error, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: dict[str, Any] = {"returned": function(impl, folder)}
        except Exception:
            result = {"raised": traceback.format_exc()}
    # Torch 2.8 says once in a process what it does to a storage.
    texts = {f"{one.category.__name__}: {one.message}" for one in caught}
    warned = sorted(text for text in texts if "TypedStorage is deprecated" not in text)
    return {**result, "warned": warned}


def compare(names: list[str], folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Run in each process: do each of them with torch's classes and with modkit's."""
    return {
        name: {str(impl): outcome(SCENARIOS[name], impl, folder) for impl in (TORCH, MODKIT)}
        for name in names
    }
