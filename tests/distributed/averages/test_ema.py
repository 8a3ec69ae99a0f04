import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import modkit
from modkit import schedules
from modkit.averaging.sharding import is_sharded, local_shard
from modkit.optim.swa_utils import AveragedModel
from tests.distributed.averages.networks import (
    average_both,
    averages_of,
    counted,
    differing,
    network,
    sgd,
    split,
    state_of,
    take_step,
    train,
    trained,
    whole,
)
from tests.distributed.launcher import run


# Returns the results of a check on all ranks, by its name.
Found = Callable[[str], list[Any]]
BF16, FP32 = torch.bfloat16, torch.float32
# The kinds of averages, each with the dtype of the model.
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {"decay": 0.9}),
    "fp64": (FP32, {"decay": 0.9, "precision": "fp64"}),
    "bf16 in fp32": (BF16, {"decay": 0.9}),
    "bf16 as it is": (BF16, {"decay": 0.9, "precision": "same"}),
    "several": (FP32, {"decay": [0.5, 0.9, 0.99]}),
    "swa": (FP32, {"schedule": schedules.Equal()}),
    "every other": (FP32, {"decay": 0.9, "update_every": 2}),
    "skip": (FP32, {"decay": 0.9, "on_nonfinite": "skip"}),
    "cpu": (FP32, {"decay": 0.9, "device": "cpu"}),
    "chosen": (FP32, {"decay": 0.9, "include": "0.*", "buffers": "average"}),
}


# Those that a run of all tests looks at; `nox -s distributed` takes each of them.
SHORT = ["fp32", "bf16 in fp32", "several", "cpu"]


def average_kinds(kinds: list[str]) -> dict[str, list[str]]:
    """Average a sharded model, and a full model beside it."""
    found = {}
    for kind in kinds:
        dtype, options = KINDS[kind]
        net = split(network(dtype))
        ema, reference, _ = average_both(net, network(dtype), 5, **options)
        found[kind] = differing(whole(ema.state_dict()), reference.state_dict())
        if not differing(averages_of(ema), state_of(net)):
            found[kind].append("the average is no other than the weights")
    return found


def test_averages_are_those_of_one_process(found: Found) -> None:
    """Put together, the shards have all bits of the average of the whole model: 7 rows and 1."""
    assert found("kinds") == [{kind: [] for kind in SHORT}] * 2


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        pytest.param(3, SHORT[:1], id="3"),
        pytest.param(2, [*KINDS], id="2-every kind", marks=pytest.mark.distributed),
        pytest.param(3, [*KINDS], id="3-every kind", marks=pytest.mark.distributed),
    ],
)
def test_averages_at_other_world_sizes(ranks: int, kinds: list[str], tmp_path: Path) -> None:
    """So it is with each kind of average, on two ranks and on three."""
    results = run(ranks, average_kinds, kinds, folder=tmp_path)

    assert results == [{kind: [] for kind in kinds}] * ranks


def look_at_shards() -> dict[str, Any]:
    """Tell what a process keeps."""
    ema = trained(2, decay=0.9)
    kept = dict(ema.named_averages())
    fresh: modkit.EMA[Any] = modkit.EMA(ema.model, decay=0.9)
    fresh.load_state_dict(whole(ema.state_dict()))
    return {
        "loaded": differing(whole(fresh.state_dict()), whole(ema.state_dict())),
        "local": {name: tuple(local_shard(t).shape) for name, t in kept.items() if is_sharded(t)},
        "global": {name: tuple(tensor.shape) for name, tensor in kept.items()},
        "bytes": sum(local_shard(t).untyped_storage().nbytes() for t in kept.values()),
    }


def test_each_process_keeps_its_shards(found: Found) -> None:
    """The first one of two has 4 of 7 rows and the 1 row, the other one 3 rows and nothing.

    A state with full tensors loads into them.
    """
    first, second = found("shards")
    shapes = {name: tuple(tensor.shape) for name, tensor in network().state_dict().items()}

    assert (first["local"]["0.weight"], second["local"]["0.weight"]) == ((4, 5), (3, 5))
    assert (first["local"]["3.weight"], second["local"]["3.weight"]) == ((1, 7), (0, 7))
    assert first["global"] == second["global"] == shapes
    assert first["loaded"] == second["loaded"] == []
    # Of the first layer and of the normalization 4 or 3 rows; of the last one 1 or none. The buffers
    # are whole: two of 7 numbers, and a counter.
    assert first["bytes"] == 4 * (4 * 8 + 8 + 14) + 8
    assert second["bytes"] == 4 * (3 * 8 + 14) + 8


def count_updates() -> dict[str, tuple[int, int]]:
    """Count what an update of each kind asks of other processes, and of the device."""
    found = {}
    for kind, (dtype, options) in KINDS.items():
        ema = modkit.EMA(split(network(dtype)), **options)
        optimizer = sgd(ema.model)
        train(ema, optimizer, 0, 4)
        take_step(ema.model, optimizer, 4)
        found[kind] = counted(ema.update)
    ema = trained(2, decay=0.9, on_nonfinite="raise")
    found["raise"] = counted(ema.update)
    found["forward"] = counted(lambda: ema.model(torch.ones(2, 5)))
    return found


def test_an_update_asks_nobody(found: Found) -> None:
    """It takes no collective, and the host waits for nothing; a check of all shards takes one."""
    costs = found("updates")[0]
    gathered, _ = costs.pop("forward")
    collectives, reads = costs.pop("raise")

    # The counters must have counted something.
    assert gathered > 0
    assert collectives == 1
    assert reads > 0
    assert costs.pop("skip") == (1, 0)
    assert costs == dict.fromkeys(costs, (0, 0))


def meet_bad_steps() -> dict[str, Any]:
    """Have a weight of one process become infinite for a step, and be a number again."""
    ema = modkit.EMA(split(network()), decay=0.5, on_nonfinite="skip")
    strict = modkit.EMA(ema.model, decay=0.5, on_nonfinite="raise")
    train(ema, sgd(ema.model), 0, 3)
    strict.update()
    before = averages_of(ema), averages_of(strict)
    row = local_shard(ema.model[0].weight.detach())
    kept = row.clone()
    if torch.distributed.get_rank() == 1:
        row.fill_(float("inf"))
    ema.update()
    with pytest.raises(RuntimeError) as caught:
        strict.update()
    after = averages_of(ema), averages_of(strict)
    row.copy_(kept)
    ema.update()
    strict.update()
    return {
        "skipped": differing(after[0], before[0]),
        "raised": differing(after[1], before[1]),
        "message": str(caught.value),
        "moved": len(differing(averages_of(ema), after[0])),
        "counts": (strict.n_averaged, strict.step),
    }


def test_a_bad_shard_is_a_bad_step_for_all(found: Found) -> None:
    """No process takes its shards of a step into the average that another one leaves out."""
    first, second = found("bad steps")

    for seen in first, second:
        assert seen["skipped"] == seen["raised"] == []
        assert seen["moved"] > 0
        assert seen["counts"] == (2, 2)
    assert "a parameter on another rank is not finite" in first["message"]
    assert "0.weight is not finite" in second["message"]


def skip_in_a_stage() -> int:
    """Return how many models a rank has averaged, whose stage of a pipeline is sharded by itself."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"]
    stage = nn.Linear(2, 2)
    fully_shard(stage, mesh=mesh)
    ema = modkit.EMA(stage, decay=0.5, on_nonfinite="skip")
    ema.update()
    if torch.distributed.get_rank() == 1:
        local_shard(stage.weight.detach()).fill_(float("nan"))
    ema.update()
    return ema.n_averaged


def test_a_bad_step_of_one_stage_is_taken_by_another(found: Found) -> None:
    """Only the ranks that share the shards of a model decide whether its step is skipped."""
    assert found("stages") == [2, 1]


def skip_beside_a_layer_of_rank_0() -> list[int]:
    """Return how many models each rank has averaged before and after a bad step of that layer."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(net[0], init_device_mesh("cpu", (2,)), ColwiseParallel())
    with warnings.catch_warnings():
        # Torch warns that a mesh of some ranks has no random state of its own.
        warnings.simplefilter("ignore")
        distribute_module(net[1], DeviceMesh("cpu", [0]))
    ema: modkit.EMA[Any] = modkit.EMA(net, decay=0.5, on_nonfinite="skip")
    counts = []
    for value in 1.0, 2.0, float("inf"):
        with torch.no_grad():
            local_shard(net[1].weight).fill_(value)
        ema.update()
        counts.append(ema.n_averaged)
    return counts


def test_a_layer_of_some_ranks_is_averaged(found: Found) -> None:
    """A rank that is not in the mesh of a layer still takes part in decisions about others."""
    assert found("layer of rank 0") == [[1, 2, 2]] * 2


def share_weights() -> dict[str, Any]:
    """Average a model whose first and last layer are one tensor of 7 rows."""

    class Tied(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 7, bias=False))
            self[2].weight = self[0].weight

    model = Tied()
    torch.distributed.fsdp.fully_shard(model)
    ema = modkit.EMA(model, decay=0.9)
    with torch.no_grad():
        for value in (1.0, 0.0):
            for parameter in model.parameters():
                parameter.fill_(value)
            ema.update()
    with ema.applied():
        tied = model[0].weight is model[2].weight
        seen = state_of(model)
    return {"names": [name for name, _ in ema.named_averages()], "tied": tied, "seen": seen}


def test_a_tensor_with_two_names_is_averaged_once(found: Found) -> None:
    """A decay of 0.9 is one of 0.9, and both names see the average."""
    for seen in found("ties"):
        assert seen["names"] == ["0.weight"]
        assert seen["tied"]
        for name in ("0.weight", "2.weight"):
            assert torch.equal(seen["seen"][name], torch.full((7, 4), 0.9))


def shard_late() -> dict[str, list[str]]:
    """Shard a model after its averages have begun, and go on, with a call of rebind() and without."""
    found: dict[str, list[str]] = {}
    for kind in SHORT:
        dtype, options = KINDS[kind]
        for rebinds in False, True:
            net, plain = network(dtype, nn.LayerNorm), network(dtype, nn.LayerNorm)
            ema: modkit.EMA[Any] = modkit.EMA(net, **options)
            reference: modkit.EMA[Any] = modkit.EMA(plain, **options)
            train(ema, sgd(net), 0, 2)
            train(reference, sgd(plain), 0, 2)
            ema.store()

            split(net)
            batch = torch.ones(2, 5, dtype=dtype)
            with torch.no_grad(), ema.applied(), reference.applied():
                outputs = differing(net(batch), plain(batch))
            ema.copy_to()
            ema.restore()
            restored = differing(state_of(net), dict(plain.state_dict()))
            if rebinds:
                ema.rebind()
            take_step(net, sgd(net), 2)
            ema.update()
            plain.load_state_dict(state_of(net))
            reference.update()
            averages = differing(whole(ema.state_dict()), reference.state_dict())
            found[f"{kind} {rebinds}"] = [*outputs, *restored, *averages]
    return found


def test_a_model_may_be_sharded_after_its_averages(found: Found) -> None:
    """Averages of the full tensors are sharded with the model, and so are stored weights."""
    for seen in found("late"):
        assert seen == {f"{kind} {rebinds}": [] for kind in SHORT for rebinds in (False, True)}


def batch_of(number: int) -> Tensor:
    """Return a batch of which each process has another one."""
    seed = 10 * number + torch.distributed.get_rank()
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))


def take_two_steps(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step on two batches, the first of which is not exchanged."""
    optimizer.zero_grad()
    assert isinstance(net, DistributedDataParallel)
    with net.no_sync():
        net(batch_of(2 * number)).square().mean().backward()
    net(batch_of(2 * number + 1)).square().mean().backward()
    optimizer.step()


def average_copies() -> dict[str, Any]:
    """Average a model under its wrapper, the model itself, and a plain one with its weights."""
    net, plain = network(norm=nn.LayerNorm), network(norm=nn.LayerNorm)
    wrapped = DistributedDataParallel(net)
    optimizer = sgd(wrapped)
    outer: modkit.EMA[Any] = modkit.EMA(wrapped, decay=[0.5, 0.9]).attach(optimizer)
    inner: modkit.EMA[Any] = modkit.EMA(net, decay=[0.5, 0.9]).attach(optimizer)
    reference: modkit.EMA[Any] = modkit.EMA(plain, decay=[0.5, 0.9])
    copied, plain_copy = AveragedModel(wrapped), torch.optim.swa_utils.AveragedModel(plain)
    for number in range(4):
        take_two_steps(wrapped, optimizer, number)
        copied.update_parameters(wrapped)
        plain.load_state_dict(net.state_dict())
        reference.update()
        plain_copy.update_parameters(plain)
    batch = torch.ones(2, 5)
    raw = wrapped(batch).detach()
    with inner.applied(wrapped, index=1):
        through_wrapper = wrapped(batch).detach()
    with outer.applied(index=1):
        inside = net(batch).detach()
    with reference.applied(index=1):
        expected = plain(batch).detach()
    fresh: modkit.EMA[Any] = modkit.EMA(net, decay=[0.5, 0.9])
    fresh.load_state_dict(outer.state_dict())
    outer.detach()
    return {
        "outer": differing(outer.state_dict(), reference.state_dict()),
        "inner": differing(inner.state_dict(), reference.state_dict()),
        "loaded": differing(fresh.state_dict(), reference.state_dict()),
        "copied": differing(
            dict(copied.module.module.state_dict()),  # type: ignore[operator]
            dict(plain_copy.module.state_dict()),
        ),
        "names": list(averages_of(outer)),
        "outputs": differing(
            [through_wrapper, inside, wrapped(batch).detach()], [expected] * 2 + [raw]
        ),
        "apart": not torch.equal(raw, inside),
        "costs": (counted(outer.update), counted(lambda: copied.update_parameters(wrapped))),
        "steps": (outer.n_averaged, inner.n_averaged),
        "averages": [averages_of(inner, index) for index in (0, 1)],
    }


def test_ddp_makes_no_difference(found: Found) -> None:
    """Averages are those of the plain model on all ranks, once per step, without communication."""
    results = found("ddp")

    assert differing(results[0]["averages"], results[1]["averages"]) == []
    for seen in results:
        assert seen["outer"] == seen["inner"] == seen["loaded"] == seen["copied"] == []
        assert seen["names"] == list(network(norm=nn.LayerNorm).state_dict())
        assert seen["outputs"] == []
        assert seen["apart"]
        assert seen["costs"] == ((0, 0), (0, 0))
        # The counting took two more.
        assert seen["steps"] == (6, 4)


CHECKS: dict[str, Callable[[], Any]] = {
    "kinds": lambda: average_kinds(SHORT),
    "shards": look_at_shards,
    "updates": count_updates,
    "bad steps": meet_bad_steps,
    "stages": skip_in_a_stage,
    "layer of rank 0": skip_beside_a_layer_of_rank_0,
    "ties": share_weights,
    "late": shard_late,
    "ddp": average_copies,
}


def check_all() -> dict[str, Any]:
    """Run on each of two ranks."""
    return {name: check() for name, check in CHECKS.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all checks on the same two ranks; return a function that gives what each has seen."""
    results = run(2, check_all, folder=tmp_path_factory.mktemp("checks"), limit=120.0)
    return lambda name: [result[name] for result in results]
