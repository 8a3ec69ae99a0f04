from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from modkit.averaging.sharding import is_sharded, local_shard, whole
from modkit.optim import swa_utils
from tests.distributed.averages import networks
from tests.distributed.launcher import run


# The averaging functions of torch, and those that modkit adds.
KINDS: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "buffers": {"use_buffers": True},
    "fp64": {"precision": "fp64"},
    "skip": {"on_nonfinite": "skip"},
}


def average_both() -> dict[str, Any]:
    """Average a sharded model, and beside it with torch a model with the full weights."""
    found: dict[str, Any] = {}
    for kind, options in KINDS.items():
        net, plain = networks.split(networks.network()), networks.network()
        averaged = swa_utils.AveragedModel(net, **options)
        own = {
            key: value for key, value in options.items() if key not in {"on_nonfinite", "precision"}
        }
        reference: Any = torch.optim.swa_utils.AveragedModel(plain, **own)
        if kind == "fp64":
            reference.module.double()
        optimizer = networks.sgd(net)
        for number in range(4):
            networks.take_step(net, optimizer, number)
            averaged.update_parameters(net)
            plain.load_state_dict(networks.state_of(net))
            reference.update_parameters(plain.double() if kind == "fp64" else plain)
            plain.float()
        state, expected = whole(dict(averaged.state_dict())), dict(reference.state_dict())
        if kind == "buffers":
            # Torch averages this counter as well.
            del state["module.1.num_batches_tracked"], expected["module.1.num_batches_tracked"]
        found[kind] = networks.differing(state, expected)
        batch = torch.ones(6, 5, dtype=torch.float64 if kind == "fp64" else torch.float32)
        averaged.eval()
        reference.eval()
        found[f"{kind} call"] = networks.differing(
            averaged(batch).detach(), reference(batch).detach()
        )
        found[f"{kind} costs"] = networks.counted(lambda: averaged.update_parameters(net))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.distributed)])
def test_the_copy_is_torchs_average_of_the_whole_model(ranks: int, tmp_path: Path) -> None:
    """Its shards are torch's bits, it can be called, and an update asks no other process."""
    for found in run(ranks, average_both, folder=tmp_path):
        for kind in KINDS:
            assert found[kind] == found[f"{kind} call"] == []
            assert found[f"{kind} costs"] == ((1 if kind == "skip" else 0), 0)


def look_at_copies() -> dict[str, Any]:
    """Copy models that are sharded in several ways."""
    found: dict[str, Any] = {}
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for kind, options in {
        "plain": {},
        "kept whole": {"reshard_after_forward": False},
        "mixed": {"mp_policy": bf16},
    }.items():
        # In mixed precision, batch normalization would need a policy of its own.
        net = networks.split(networks.network(norm=nn.LayerNorm), **options)
        calls: list[str] = []
        net[2].register_forward_hook(lambda *_: calls.append("own hook"))
        optimizer = networks.sgd(net)
        networks.take_step(net, optimizer, 0)
        copied = swa_utils.AveragedModel(net)
        pairs = list(zip(copied.module.parameters(), net.parameters(), strict=True))
        whole_ones = [not is_sharded(parameter) for parameter in copied.module.parameters()]
        apart = [
            local_shard(one).untyped_storage().data_ptr()
            != local_shard(other).untyped_storage().data_ptr()
            for one, other in pairs
            if local_shard(one).numel()
        ]
        calls.clear()
        batch = torch.ones(6, 5)
        net.eval()
        copied.eval()
        found[kind] = {
            "outputs": networks.differing(copied(batch).detach(), net(batch).detach()),
            "dtype": str(copied(batch).dtype),
            "calls": len(calls),
            "whole": any(whole_ones),
            "apart": all(apart),
            "after": [is_sharded(parameter) for parameter in copied.module.parameters()],
            "like": [is_sharded(parameter) for parameter in net.parameters()],
            "class": type(copied.module).__name__,
        }
        # The copy trains, and the model does not move with it.
        before = networks.state_of(net)
        copied.train()
        networks.take_step(copied.module, networks.sgd(copied.module), 1)
        found[kind]["still"] = networks.differing(networks.state_of(net), before)
    return found


def test_copies_are_split_up_in_the_same_way(tmp_path: Path) -> None:
    """With the same options and hooks, and shards of their own."""
    for found in run(2, look_at_copies, folder=tmp_path):
        for one in found.values():
            assert one["outputs"] == one["still"] == []
            assert one["calls"] == 3
            assert not one["whole"]
            assert one["apart"]
            assert one["after"] == one["like"]
            assert one["class"] == "FSDPSequential"
        assert found["plain"]["dtype"] == "torch.float32"
        assert found["mixed"]["dtype"] == "torch.bfloat16"


def refuse_two_ways() -> str:
    """Copy a model that tensor parallelism has sharded before."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net = networks.network()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="sharded by more") as caught:
        swa_utils.AveragedModel(net)
    return str(caught.value)


def test_models_that_are_split_up_twice_are_refused(tmp_path: Path) -> None:
    """The error says what averages them."""
    for message in run(2, refuse_two_ways, folder=tmp_path):
        assert "Sequential: parameter 0.weight is sharded by more than fully_shard" in message
        assert "modkit.EMA averages it without a copy" in message
