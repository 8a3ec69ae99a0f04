from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import modkit
from modkit.distributed import export_average, load_averages
from tests.distributed.averages.networks import averages_of, counted, differing, state_of, whole
from tests.distributed.launcher import run


pytestmark = pytest.mark.distributed


def network() -> nn.Sequential:
    """Return a network whose layers tensor parallelism can shard by columns and rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def replicated() -> nn.Module:
    """Split a network up in two, twice."""
    net = network()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def both_ways() -> nn.Module:
    """Shard the shards of tensor parallelism once more."""
    net = network()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net


WAYS = {
    "replicated": replicated,
    "both ways": both_ways,
}


def average(way: str, folder: Path) -> dict[str, Any]:
    """Average such a model in 4 steps, save, load, export, and call it with the average."""
    torch.manual_seed(0)
    net, plain = WAYS[way](), network()
    plain.load_state_dict(state_of(net))
    ema: modkit.EMA[Any] = modkit.EMA(net, decay=[0.5, 0.9])
    reference: modkit.EMA[Any] = modkit.EMA(plain, decay=[0.5, 0.9])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(4):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        ema.update()
        plain.load_state_dict(state_of(net))
        reference.update()
    found: dict[str, Any] = {
        "differing": differing(whole(ema.state_dict()), reference.state_dict())
    }
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=folder / "checkpoint")
    fresh: modkit.EMA[Any] = modkit.EMA(net, decay=[0.5, 0.9])
    load_averages(fresh, folder / "checkpoint")
    found["loaded"] = differing(averages_of(fresh, 1), averages_of(ema, 1))
    export_average(ema, folder / "average.safetensors", index=1)
    single: modkit.EMA[Any] = modkit.EMA(plain, decay=[0.5, 0.9])
    load_averages(single, folder / "checkpoint")
    found["single"] = differing(averages_of(single, 1), averages_of(ema, 1))
    batch = torch.ones(2, 5)
    with torch.no_grad():
        raw = net(batch)
        with ema.applied(), reference.applied():
            # Sums over processes are taken in another order.
            found["close"] = torch.allclose(net(batch), plain(batch), atol=1e-6)
            found["apart"] = not torch.equal(net(batch), raw)
        found["back"] = torch.equal(net(batch), raw)
    found["costs"] = counted(ema.update)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_meshes_of_two_dimensions_are_averaged(way: str, tmp_path: Path) -> None:
    """Replicas of shards, and shards of tensor parallelism: bits, checkpoints, files, calls."""
    for found in run(4, average, way, tmp_path, folder=tmp_path / "run"):
        assert found["differing"] == found["loaded"] == found["single"] == []
        assert found["close"]
        assert found["apart"]
        assert found["back"]
        assert found["costs"] == (0, 0)
