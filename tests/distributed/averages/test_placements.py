"""Averages that meet a model, or a state, with other placements, and full ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import modkit
from modkit.distributed import export_average, load_averages
from modkit.optim import swa_utils
from tests.distributed.averages.networks import averages_of, differing, state_of, whole
from tests.distributed.launcher import run


# Returns the results of a check on all ranks, by its name.
Found = Callable[[str], list[Any]]


def network(rows: int = 2) -> nn.Sequential:
    """Return a network of which each of two ranks has one row, which torch would broadcast."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, rows), nn.BatchNorm1d(rows), nn.Linear(rows, 2))


def full() -> nn.Module:
    """Return it as it is."""
    return network()


def fsdp() -> nn.Module:
    """Shard all of it as one group, which a forward leaves unsharded."""
    net = network()
    fully_shard(net)
    return net


def replicated() -> nn.Module:
    """Make tensors of all ranks of its tensors, buffers included."""
    net = network()
    distribute_module(net, init_device_mesh("cpu", (2,)))
    return net


def by_rows() -> nn.Module:
    """Shard the rows of the first layer and the columns of the last one."""
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(network(), init_device_mesh("cpu", (2,)), plan)


def by_columns() -> nn.Module:
    """Shard the columns of the first layer and the rows of the last one."""
    plan: Any = {"0": RowwiseParallel(), "2": ColwiseParallel()}
    return parallelize_module(network(), init_device_mesh("cpu", (2,)), plan)


WAYS = [full, fsdp, replicated, by_rows, by_columns]


def move(net: nn.Module, step: int = 1) -> None:
    """Add a number to all elements of a model."""
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(step)


def averaged(net: nn.Module) -> "modkit.EMA[Any]":
    """Average a model in two steps."""
    ema: modkit.EMA[Any] = modkit.EMA(net, decay=0.5)
    ema.update()
    move(net)
    ema.update()
    return ema


def relay(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> dict[str, list[str]]:
    """Give averages of one model to another model of the same values in all ways that there are."""
    ema = averaged(first())
    expected = averages_of(ema)
    results: dict[str, list[str]] = {}

    other = second()
    ema.copy_to(other)
    results["copy_to"] = differing(state_of(other), expected)

    other = second()
    raw = state_of(other)
    for key in ("applied", "applied again"):
        with ema.applied(other):
            results[key] = differing(state_of(other), averages_of(ema))
        results[f"after {key}"] = differing(state_of(other), raw)
        move(ema.model)
        ema.update()

    resumed: modkit.EMA[Any] = modkit.EMA(second(), decay=0.5)
    resumed.load_state_dict(ema.state_dict())
    results["loaded"] = differing(averages_of(resumed), averages_of(ema))

    reference: modkit.EMA[Any] = modkit.EMA(network(), decay=0.5)
    reference.load_state_dict(whole(ema.state_dict()))
    for key in ("updated", "updated again"):
        resumed.update()
        ema.update(other)
        reference.update()
        results[key] = differing(averages_of(ema), averages_of(reference))
        results[f"resumed and {key}"] = differing(averages_of(resumed), averages_of(reference))
    return results


def relay_all() -> dict[str, list[str]]:
    """Return where averages differ, by the ways to shard both models."""
    return {
        f"{first.__name__} to {second.__name__}: {key}": places
        for first in WAYS
        for second in WAYS
        for key, places in relay(first, second).items()
        if places
    }


def test_averages_follow_another_model_wherever_its_elements_are(found: Found) -> None:
    """Full and sharded models take averages, and states, of models that are sharded otherwise."""
    for seen in found("relay"):
        assert seen == {}


def shard_beside_copies() -> dict[str, list[str]]:
    """Shard a model whose buffers are copied, and one with a second model, after their updates."""
    results = {}
    for buffers in ("copy", "average"):
        net, plain = network(), network()
        ema: modkit.EMA[Any] = modkit.EMA(net, decay=0.5, buffers=buffers)  # type: ignore[arg-type]
        reference: modkit.EMA[Any] = modkit.EMA(plain, decay=0.5, buffers=buffers)  # type: ignore[arg-type]
        module = ema.module
        for each in (ema, reference):
            each.update()
        distribute_module(net, init_device_mesh("cpu", (2,)))
        for each in (ema, reference):
            move(each.model)
            each.update()
        results[buffers] = differing(averages_of(ema), averages_of(reference))
        assert ema.module is module
        results[f"module {buffers}"] = differing(dict(module.state_dict()), averages_of(reference))
    return results


def test_buffers_and_the_second_model_follow_a_model_that_is_sharded_late(found: Found) -> None:
    """Copied buffers become sharded, and the second model stays a full one."""
    for seen in found("late"):
        assert not any(seen.values())


def halfway(average: Tensor, current: Tensor, _: object) -> Tensor:
    """Return the mean of an average and a parameter."""
    return (average + current) / 2


def update_copies(impl: Any, function: str) -> dict[str, Any]:
    """Update averaged models with models of other placements; return the sums or the error."""
    results: dict[str, Any] = {}
    functions: dict[str, dict[str, Any]] = {
        "swa": {},
        "own": {"avg_fn": halfway},
    }
    for first, second in ((by_rows, by_columns), (replicated, by_rows), (by_rows, full)):
        average = impl.AveragedModel(first(), **functions[function])
        average.update_parameters(first())
        other = second()
        move(other)
        try:
            average.update_parameters(other)
        except RuntimeError as error:
            results[f"{first.__name__} and {second.__name__}"] = str(error)
        else:
            results[f"{first.__name__} and {second.__name__}"] = state_of(average.module)
    return results


def test_averaged_models_combine_placements_as_torch_does(found: Found) -> None:
    """Other placements are averaged, and a full model is refused in torch's words."""
    for seen in found("copies"):
        for theirs, ours in seen.values():
            assert differing(ours, theirs) == []


def copy_and_call() -> dict[str, Any]:
    """Call a model between copy_to() and restore(), after which full parameters are registered."""
    net = fsdp().eval()
    ema = averaged(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema.attach(optimizer)
    raw = state_of(net)
    ema.store()
    ema.copy_to()
    refusals = []
    for refused in (ema.update, optimizer.step, ema.store, ema.rebind):
        with torch.no_grad():
            net(torch.ones(2, 4))
        with pytest.raises(RuntimeError) as caught:
            refused()
        refusals.append(str(caught.value))
    ema.restore()
    return {"refusals": refusals, "raw": differing(state_of(net), raw), "models": ema.n_averaged}


def test_a_copied_average_is_not_averaged_after_a_forward(found: Found) -> None:
    """Updates, steps and store() are refused, though a forward has replaced the shards."""
    for seen in found("copied"):
        assert all("between copy_to() and restore()" in text for text in seen["refusals"])
        assert seen["raw"] == []
        assert seen["models"] == 2


def save_snapshots(folder: Path) -> dict[str, Any]:
    """Keep power averages of a sharded model and of a full one, and combine their snapshots."""
    found: dict[str, Any] = {}
    for key, net in (("sharded", by_rows()), ("full", full())):
        averages = modkit.PostHocEMA(net, folder / key, snapshot_every=2)
        # As in training, where the first step of a rank waits for that of each other one.
        torch.distributed.barrier()
        for _ in range(5):
            averages.update()
            move(net)
        with torch.inference_mode():
            averages.update()
        found[key] = averages.reconstruct(0.08)
    sharded = by_columns()
    found["sharded"].copy_to(sharded)
    expected = {**found["full"].averages, **found["full"].buffers}
    return {
        "averages": differing({**found["sharded"].averages, **found["sharded"].buffers}, expected),
        "model": differing(state_of(sharded), expected),
    }


def test_snapshots_have_full_tensors(found: Found) -> None:
    """All ranks write the same file, which any model takes; one rank's shards would be lost."""
    for seen in found("snapshots"):
        assert seen == {"averages": [], "model": []}


def evaluate_in_inference_mode(folder: Path) -> dict[str, list[str]]:
    """Write and read averages where an evaluation may: inside inference mode."""
    ema = averaged(fsdp())
    dcp.save({"ema": ema}, checkpoint_id=folder / "inference")
    resumed: modkit.EMA[Any] = modkit.EMA(fsdp(), decay=0.5)
    with torch.inference_mode():
        for name in ("inference.pt", "inference.safetensors"):
            export_average(ema, folder / name)
        load_averages(resumed, folder / "inference")
    resumed.update()
    expected = averages_of(ema)
    ema.load_state_dict(whole(ema.state_dict()))
    ema.update(resumed.model)
    return {
        "pt": differing(torch.load(folder / "inference.pt"), expected),
        "safetensors": differing(load_file(folder / "inference.safetensors"), expected),
        "loaded": differing(averages_of(resumed), averages_of(ema)),
    }


def test_averages_are_written_and_read_inside_inference_mode(found: Found) -> None:
    """There torch detaches and redistributes no DTensor."""
    for seen in found("inference mode"):
        assert seen == {"pt": [], "safetensors": [], "loaded": []}


CHECKS: dict[str, Callable[[Path], Any]] = {
    "inference mode": evaluate_in_inference_mode,
    "snapshots": save_snapshots,
    "copied": lambda _: copy_and_call(),
    "relay": lambda _: relay_all(),
    "late": lambda _: shard_beside_copies(),
    "copies": lambda _: {
        key: [update_copies(impl, key) for impl in (torch.optim.swa_utils, swa_utils)]
        for key in ("swa", "own")
    },
}


def check_all(folder: Path) -> dict[str, Any]:
    """Run on each of two ranks."""
    return {name: check(folder) for name, check in CHECKS.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all checks on the same two ranks; return a function that gives what each has seen."""
    folder = tmp_path_factory.mktemp("placements")
    results = run(2, check_all, folder, folder=folder / "run", limit=120.0)
    return lambda name: [result[name] for result in results]
