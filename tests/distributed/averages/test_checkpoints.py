import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)

import modkit
from modkit import schedules
from modkit.averaging.sharding import is_sharded, local_shard
from modkit.distributed import load_averages
from tests.distributed.averages.networks import (
    averages_of,
    differing,
    network,
    sgd,
    split,
    state_of,
    train,
    trained,
    whole,
)
from tests.distributed.launcher import run


# The entries of a checkpoint for each kind of average, beside the averages.
KINDS: dict[str, dict[str, Any]] = {
    "one": {"decay": 0.9},
    "several, kept on the host": {"decay": [0.5, 0.9], "device": "cpu"},
    "rounded at random": {"decay": 0.9, "precision": "stochastic"},
    "the mean": {"schedule": schedules.Equal()},
}


# Those that a run of all tests looks at; `nox -s distributed` takes each of them.
SHORT = ["one", "the mean"]
EVERY = [*KINDS]


def save_all(kinds: list[str], folder: Path) -> dict[str, Any]:
    """Train a sharded model, save an average of each kind, and return the full averages."""
    net = split(network())
    averages = {kind: modkit.EMA(net, **KINDS[kind]) for kind in kinds}
    optimizer = sgd(net)
    for ema in averages.values():
        train(ema, optimizer, 2, 4)
    states = {kind: ema.state_dict() for kind, ema in averages.items()}
    dcp.save({"model": get_model_state_dict(net), "averages": states}, checkpoint_id=folder)
    return {"states": whole(states), "model": state_of(net)}


def load_all(kinds: list[str], folder: Path) -> dict[str, Any]:
    """Load them into new averages of a model that is sharded over the present ranks."""
    net = network() if torch.distributed.get_world_size() == 1 else split(network())
    model = get_model_state_dict(net)
    dcp.load({"model": model}, checkpoint_id=folder)
    set_model_state_dict(net, model)
    found, moved, local = {}, {}, {}
    for kind in kinds:
        ema = modkit.EMA(net, **KINDS[kind])
        load_averages(ema, folder, key=f"averages.{kind}")
        found[kind] = copy.deepcopy(whole(ema.state_dict()))
        average = dict(ema.named_averages())["0.weight"]
        local[kind] = (is_sharded(average), local_shard(average).shape[0], average.shape[0])
        with ema.applied():
            pass
        before = averages_of(ema)
        optimizer = sgd(net)
        train(ema, optimizer, 4, 5)
        moved[kind] = len(differing(averages_of(ema), before))
    return {"states": found, "local": local, "moved": moved}


def check_loaded(saved: dict[str, Any], loaded: list[Any], rows: list[int]) -> None:
    """Assert that each rank has all bits of the averages, in its rows of the 7."""
    for rank, found in enumerate(loaded):
        assert differing(found["states"], saved["states"]) == []
        local = (len(rows) > 1, rows[rank], 7)
        assert found["local"] == dict.fromkeys(found["states"], local)
        assert all(found["moved"].values())


@pytest.mark.distributed
@pytest.mark.parametrize("rows", [[7], [4, 3], [3, 3, 1]], ids=["1", "2", "3"])
def test_every_kind_of_average_loads_on_other_ranks(rows: list[int], tmp_path: Path) -> None:
    """Every average has all its bits, in shards of 7 rows for the processes that are there now."""
    folder = tmp_path / "checkpoint"
    saved = run(2, save_all, EVERY, folder, folder=tmp_path / "save")
    loaded = run(len(rows), load_all, EVERY, folder, folder=tmp_path / "load")

    assert differing(saved[0], saved[1]) == []
    check_loaded(saved[0], loaded, rows)


def save_one(folder: Path) -> dict[str, Any]:
    """Save one average, with the numbers that come after two further steps."""
    ema = modkit.EMA(split(network()), decay=0.9)
    optimizer = sgd(ema.model)
    train(ema, optimizer, 0, 3)
    dcp.save({"ema": ema, "model": get_model_state_dict(ema.model)}, checkpoint_id=folder)
    saved = averages_of(ema)
    train(ema, optimizer, 3, 5)
    return {"saved": saved, "later": averages_of(ema)}


def load_in_place(folder: Path) -> dict[str, Any]:
    """Load as torch's own functions do: into what is there already, and into what is not yet."""
    ema = modkit.EMA(split(network()), decay=0.9)
    optimizer = sgd(ema.model)
    with pytest.raises(modkit.errors.NameMismatchError) as caught:
        dcp.load({"ema": ema}, checkpoint_id=folder)
    message, fresh = str(caught.value), (ema.step, dict(ema.named_averages()))
    train(ema, optimizer, 7, 9)
    model = get_model_state_dict(ema.model)
    dcp.load({"ema": ema, "model": model}, checkpoint_id=folder)
    set_model_state_dict(ema.model, model)
    loaded = averages_of(ema)
    train(ema, optimizer, 3, 5)
    return {"message": message, "fresh": fresh, "loaded": loaded, "later": averages_of(ema)}


def save_inside(folder: Path) -> dict[str, Any]:
    """Save while the average is in the model, as an evaluation may."""
    ema = trained(3, decay=0.5)
    raw = state_of(ema.model)
    with ema.applied():
        model = get_model_state_dict(ema.model)
        dcp.save({"model": model, "ema": ema.state_dict()}, checkpoint_id=folder)
    return {"raw": raw, "average": averages_of(ema)}


def load_inside(folder: Path) -> dict[str, Any]:
    """Load that; the weights of the checkpoint are those of the average."""
    ema = modkit.EMA(split(network()), decay=0.5)
    model = get_model_state_dict(ema.model)
    dcp.load({"model": model}, checkpoint_id=folder)
    set_model_state_dict(ema.model, model)
    with pytest.warns(UserWarning, match="was saved inside applied"):
        load_averages(ema, folder)
    return {"raw": state_of(ema.model), "average": averages_of(ema)}


def save_while_training(folder: Path) -> dict[str, Any]:
    """Save in the background, and move the averages meanwhile."""
    # Of its own, as training uses the other one at the same time.
    group = torch.distributed.new_group(backend="gloo")
    ema = modkit.EMA(split(network()), decay=[0.5, 0.9])
    optimizer = sgd(ema.model)
    train(ema, optimizer, 0, 3)
    saved = averages_of(ema), averages_of(ema, 1)
    state = {"ema": ema.state_dict()}
    future: Any = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    train(ema, optimizer, 3, 6)
    future.result()
    fresh = modkit.EMA(split(network()), decay=[0.5, 0.9])
    load_averages(fresh, folder)
    return {
        "first": differing(averages_of(fresh), saved[0]),
        "second": differing(averages_of(fresh, 1), saved[1]),
        "moved": len(differing(averages_of(ema), saved[0])),
    }


@pytest.mark.distributed
def test_updates_do_not_reach_what_is_being_saved(tmp_path: Path) -> None:
    """With async_save the checkpoint has the averages of the moment at which it was called."""
    for found in run(2, save_while_training, tmp_path / "checkpoint", folder=tmp_path):
        assert found["first"] == found["second"] == []
        assert found["moved"] > 0


def refusals(folder: Path) -> dict[str, str]:
    """Ask for what is not there, and for what does not fit."""
    ema = trained(2, decay=0.9)
    dcp.save({"ema": ema, "other": {"step": 1}}, checkpoint_id=folder)
    before = averages_of(ema)

    def message(call: Callable[[], object]) -> str:
        with pytest.raises((ValueError, FileNotFoundError, RuntimeError)) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    wider = nn.Sequential(nn.Linear(6, 7))
    found = {
        "no folder": message(lambda: load_averages(ema, folder / "none")),
        "no key": message(lambda: load_averages(ema, folder, key="averages")),
        "no average": message(lambda: load_averages(ema, folder, key="other")),
        "other model": message(lambda: load_averages(modkit.EMA(wider, decay=0.9), folder)),
        "other count": message(
            lambda: load_averages(modkit.EMA(ema.model, decay=[0.9, 0.5]), folder)
        ),
    }
    with ema.applied():
        found["inside"] = message(lambda: load_averages(ema, folder))
    found["differing"] = str(differing(averages_of(ema), before))
    return found


def on_two(folder: Path) -> dict[str, Any]:
    """Run on each of two ranks: save, and load on the same two."""
    found = {
        "kinds": save_all(SHORT, folder / "kinds"),
        "one": save_one(folder / "one"),
        "inside": save_inside(folder / "inside"),
    }
    return {
        **found,
        "in place": load_in_place(folder / "one"),
        "refusals": refusals(folder / "refusals"),
    }


def on_three(folder: Path) -> dict[str, Any]:
    """Run on each of three ranks: load what two have saved."""
    return {"kinds": load_all(SHORT, folder / "kinds"), "inside": load_inside(folder / "inside")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the checkpoints are."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """Return what each of two ranks has saved and loaded."""
    return run(2, on_two, folder, folder=folder / "two", limit=120.0)


@pytest.fixture(scope="module")
def three(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each of three ranks has loaded."""
    return run(3, on_three, folder, folder=folder / "three", limit=120.0)


def test_averages_of_two_ranks_load_on_three(two: Any, three: Any) -> None:
    """Every average has all its bits, in shards of 3, 3 and 1 rows."""
    assert differing(two[0]["kinds"], two[1]["kinds"]) == []
    check_loaded(two[0]["kinds"], [found["kinds"] for found in three], [3, 3, 1])


def test_torchs_own_functions_save_and_load_averages(two: Any) -> None:
    """An EMA is what dcp.save and dcp.load take as it is; one that has not begun is not filled."""
    saved, found = two[0]["one"], two[0]["in place"]

    assert "the state does not fit the model" in found["message"]
    assert found["fresh"] == (0, {})
    assert differing(found["loaded"], saved["saved"]) == []
    assert differing(found["later"], saved["later"]) == []


def test_a_checkpoint_from_inside_has_both(two: Any, three: Any) -> None:
    """Saved by two ranks inside applied(), three restore the training weights and the average."""
    for found in three:
        assert differing(found["inside"], two[0]["inside"]) == []


def test_what_does_not_fit_is_said(two: Any) -> None:
    """The error says what there is, and nothing has been changed."""
    for results in two:
        found = results["refusals"]
        assert found["no folder"].startswith("FileNotFoundError")
        assert found["no key"] == (
            "ValueError: load_averages: nothing was saved as 'averages', but ['ema', 'other']"
        )
        assert "the state is neither from modkit.EMA" in found["no average"]
        assert "0.weight (7, 5) instead of (7, 6)" in found["other model"].replace("((", "(")
        assert "holds 1 averages with 1 schedules, and this object 2" in found["other count"]
        assert "inside applied()" in found["inside"]
        assert found["differing"] == "[]"


def test_one_process_without_a_group_loads_it(folder: Path, two: Any) -> None:
    """Afterwards, on one machine, the average of a plain model is that of the two processes."""
    ema = modkit.EMA(network(), decay=0.9)
    with warnings.catch_warnings(record=True) as caught:
        load_averages(ema, folder / "one")

    assert caught == []
    assert differing(averages_of(ema), two[0]["one"]["saved"]) == []
    assert (ema.step, ema.n_averaged) == (3, 3)
