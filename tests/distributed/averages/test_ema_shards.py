from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit import schedules
from modkit.averaging.sharding import is_sharded, local_shard, whole
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
)
from tests.distributed.launcher import run


BF16, FP32 = torch.bfloat16, torch.float32
# The kinds of averages, each with the dtype of the model.
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {"decay": 0.9}),
    "fp64": (FP32, {"decay": 0.9, "precision": "fp64"}),
    "compensated": (FP32, {"decay": 0.9, "precision": "compensated"}),
    "bf16 in fp32": (BF16, {"decay": 0.9}),
    "bf16 as it is": (BF16, {"decay": 0.9, "precision": "same"}),
    "bf16 compensated": (BF16, {"decay": 0.9, "precision": "compensated"}),
    "several": (FP32, {"decay": [0.5, 0.9, 0.99]}),
    "swa": (FP32, {"schedule": schedules.Equal()}),
    "every other": (FP32, {"decay": 0.9, "update_every": 2}),
    "skip": (FP32, {"decay": 0.9, "on_nonfinite": "skip"}),
    "cpu": (FP32, {"decay": 0.9, "device": "cpu"}),
    "chosen": (FP32, {"decay": 0.9, "include": "0.*", "buffers": "average"}),
}


# Those that a run of all tests looks at; `nox -s distributed` takes each of them.
SHORT = ["fp32", "bf16 compensated", "several", "cpu"]


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


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        pytest.param(2, SHORT, id="2"),
        pytest.param(3, SHORT[:1], id="3"),
        pytest.param(2, [*KINDS], id="2-every kind", marks=pytest.mark.distributed),
        pytest.param(3, [*KINDS], id="3-every kind", marks=pytest.mark.distributed),
    ],
)
def test_averages_are_those_of_one_process(ranks: int, kinds: list[str], tmp_path: Path) -> None:
    """Put together, the shards have all bits of the average of the whole model: 7 rows and 1."""
    results = run(ranks, average_kinds, kinds, folder=tmp_path)

    assert results == [{kind: [] for kind in kinds}] * ranks


def look_at_shards() -> dict[str, Any]:
    """Tell what a process keeps."""
    ema = trained(2, decay=0.9)
    kept = dict(ema.named_averages())
    return {
        "local": {name: tuple(local_shard(t).shape) for name, t in kept.items() if is_sharded(t)},
        "global": {name: tuple(tensor.shape) for name, tensor in kept.items()},
        "bytes": sum(local_shard(t).untyped_storage().nbytes() for t in kept.values()),
    }


def test_each_process_keeps_its_shards(tmp_path: Path) -> None:
    """The first one of two has 4 of 7 rows and the 1 row, the other one 3 rows and nothing."""
    first, second = run(2, look_at_shards, folder=tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in network().state_dict().items()}

    assert (first["local"]["0.weight"], second["local"]["0.weight"]) == ((4, 5), (3, 5))
    assert (first["local"]["3.weight"], second["local"]["3.weight"]) == ((1, 7), (0, 7))
    assert first["global"] == second["global"] == shapes
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


def test_an_update_asks_nobody(tmp_path: Path) -> None:
    """It takes no collective, and the host waits for nothing; a check of all shards takes one."""
    costs = run(2, count_updates, folder=tmp_path)[0]
    gathered, _ = costs.pop("forward")
    collectives, reads = costs.pop("raise")

    # The counters must have counted something.
    assert gathered > 0
    assert collectives == 1
    assert reads > 0
    assert costs.pop("skip") == (1, 0)
    assert costs == dict.fromkeys(costs, (0, 0))


def apply(options: dict[str, Any]) -> dict[str, Any]:
    """Call a model with its average in it and without, in a run and in one of a whole model."""
    net, plain = split(network(), **options), network()
    ema, reference, optimizer = average_both(net, plain, 4, decay=0.5)
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(9))
    seen: list[list[torch.Tensor]] = []
    for model, average in (net, ema), (plain, reference):
        model.eval()
        with torch.no_grad():
            # The first call leaves full parameters in a model that is not resharded after it.
            outputs = [model(batch)]
            with average.applied():
                outputs.append(model(batch))
                inside = whole(average.state_dict())
            outputs.append(model(batch))
            model.train()
        seen.append(outputs)
    raw = state_of(net)
    take_step(net, optimizer, 4)
    return {"split": seen[0], "plain": seen[1], "inside": inside["raw"], "raw": raw, "net": net}


def apply_all() -> list[dict[str, Any]]:
    """Check models that are resharded after a forward, and models that are not."""
    runs = [apply({"reshard_after_forward": after}) for after in (True, False)]
    for one in runs:
        one["after"] = state_of(one.pop("net"))
    return runs


def test_a_forward_sees_the_average(tmp_path: Path) -> None:
    """applied() swaps the average in, restores the training weights, and training goes on."""
    for results in run(2, apply_all, folder=tmp_path):
        for one in results:
            before, inside, after = one["split"]
            assert differing(one["split"], one["plain"]) == []
            assert torch.equal(before, after)
            assert not torch.equal(before, inside)
            assert {name: one["raw"][name] for name in one["inside"]}.keys() == one["inside"].keys()
            assert not torch.equal(one["after"]["0.weight"], one["raw"]["0.weight"])


def break_rules() -> dict[str, str]:
    """Do what is not allowed inside of applied(), and read how that is refused."""
    ema = modkit.EMA(split(network()), decay=0.5)
    optimizer = sgd(ema.model)
    train(ema, optimizer, 0, 3)
    raw, average = state_of(ema.model), averages_of(ema)
    found = {}
    with ema.applied():
        with pytest.raises(RuntimeError) as caught:
            ema.update()
        found["update"] = str(caught.value)
    with pytest.raises(ValueError, match="an error of the block"), ema.applied():
        message = "an error of the block"
        raise ValueError(message)
    with pytest.raises(RuntimeError) as caught, ema.applied():
        take_step(ema.model, optimizer, 3)
    found["step"] = str(caught.value)
    ema.store()
    ema.copy_to()
    found["copied"] = str(differing(averages_of(ema), {**state_of(ema.model)}))
    ema.restore()
    # The step inside has changed the statistics of the normalization, which are not restored.
    kept = [name for name in raw if not name.startswith("1.running") and "num_" not in name]
    found["raw"] = str(
        differing({k: state_of(ema.model)[k] for k in kept}, {k: raw[k] for k in kept})
    )
    found["average"] = str(
        differing({k: averages_of(ema)[k] for k in kept}, {k: average[k] for k in kept})
    )
    return found


def test_blocks_that_go_wrong_lose_nothing(tmp_path: Path) -> None:
    """After an error, or a step that trains the average, training weights and average are kept."""
    for found in run(2, break_rules, folder=tmp_path):
        assert "was called inside applied()" in found["update"]
        assert "was written to inside applied()" in found["step"]
        assert (found["copied"], found["raw"], found["average"]) == ("[]", "[]", "[]")


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


def test_a_bad_shard_is_a_bad_step_for_all(tmp_path: Path) -> None:
    """No process takes its shards of a step into the average that another one leaves out."""
    first, second = run(2, meet_bad_steps, folder=tmp_path)

    for found in first, second:
        assert found["skipped"] == found["raised"] == []
        assert found["moved"] > 0
        assert found["counts"] == (2, 2)
    assert "a parameter on another rank is not finite" in first["message"]
    assert "0.weight is not finite" in second["message"]


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


def test_a_tensor_with_two_names_is_averaged_once(tmp_path: Path) -> None:
    """A decay of 0.9 is one of 0.9, and both names see the average."""
    for found in run(2, share_weights, folder=tmp_path):
        assert found["names"] == ["0.weight"]
        assert found["tied"]
        for name in ("0.weight", "2.weight"):
            assert torch.equal(found["seen"][name], torch.full((7, 4), 0.9))
