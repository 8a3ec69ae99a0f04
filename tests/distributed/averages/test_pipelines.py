"""Averages of pipeline stages: each rank has the layers of one stage, under the model's names."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import modkit
import modkit.distributed as facade
from modkit.distributed import FullState, export_average, load_averages
from tests.distributed.averages.networks import averages_of, counted, differing
from tests.distributed.launcher import run


LAYERS = 4


class Tower(nn.Module):
    """A network that keeps the layers of one stage, and their names, as torchtitan does."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {str(i): nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(first, last)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers in turn."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def stage_of(stages: int, number: int) -> Tower:
    """Return one of so many stages."""
    size = LAYERS // stages
    return Tower(size * number, size * (number + 1))


def averaged(stage: nn.Module) -> "modkit.EMA[Any]":
    """Average a stage in some steps, without training."""
    ema: modkit.EMA[Any] = modkit.EMA(stage, decay=0.5)
    for step in range(3):
        ema.update()
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.mul_(1 + step)
    return ema


def save_stages(folder: Path) -> dict[str, Any]:
    """Run on each of two ranks: train two stages, and save their averages in all ways."""
    rank = dist.get_rank()
    stage = stage_of(2, rank)
    # With examples, torch does not call the stage, and its batch normalization, with empty memory.
    example = torch.zeros(2, 8, requires_grad=True)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, 2, torch.device("cpu"), example, example),
        n_microbatches=4,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    ema = modkit.EMA(stage, decay=0.5).attach(optimizer)
    reference = {name: p.detach().double() for name, p in stage.named_parameters()}
    for number in range(4):
        optimizer.zero_grad()
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
        optimizer.step()
        weight = 0.5 if number else 0.0
        reference = {
            name: weight * reference[name] + (1 - weight) * p.detach()
            for name, p in stage.named_parameters()
        }
    averages = averages_of(ema)
    for name, value in reference.items():
        assert torch.allclose(averages[name].double(), value, atol=1e-6)

    dcp.save({"ema": ema}, checkpoint_id=folder / "checkpoint")
    export_average(ema, folder / "average.safetensors")
    export_average(ema, folder / "average.pt")
    full = FullState(ema).state_dict()
    if rank == 0:
        modkit.save_checkpoint(full, folder / "full.pt")
    ema.detach()
    return {"averages": averages, "cost": counted(ema.update)}


def load_stages(folder: Path) -> list[dict[str, Any]]:
    """Load the averages of two stages into as many stages as there are ranks."""
    stage = stage_of(dist.get_world_size(), dist.get_rank())
    rooms: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        real = facade._room_for

        def room_for(*args: Any) -> dict[str, Any]:
            rooms.append(real(*args))
            return rooms[-1]

        patch.setattr(facade, "_room_for", room_for)
        first: modkit.EMA[Any] = modkit.EMA(stage, decay=0.5)
        load_averages(first, folder / "checkpoint")
    second: modkit.EMA[Any] = modkit.EMA(stage, decay=0.5)
    FullState(second).load_state_dict(modkit.load_checkpoint(folder / "full.pt"))
    assert differing(second.state_dict(), first.state_dict()) == []
    # There was no room for the tensors of other stages.
    own = sum(t.numel() for t in (*stage.parameters(), *stage.buffers()))
    tensors = [value for value in rooms[0].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in tensors) == own
    return [averages_of(first), {"n_averaged": first.n_averaged}]


def test_averages_of_stages_are_those_of_one_model(tmp_path: Path) -> None:
    """Files have the tensors of all stages, and checkpoints load into any number of stages."""
    folder = tmp_path / "files"
    folder.mkdir()
    saved = run(2, save_stages, folder, folder=tmp_path / "save")
    averages = {name: tensor for found in saved for name, tensor in found["averages"].items()}

    assert [found["cost"] for found in saved] == [(0, 0), (0, 0)]
    file = torch.load(folder / "average.pt")
    assert differing(dict(file), averages) == []
    assert differing(load_file(folder / "average.safetensors"), averages) == []
    Tower().load_state_dict(file)
    assert file._metadata["layers.3.1"] == {"version": 2}
    for ranks in (1, 2, 4):
        found = run(ranks, load_stages, folder, folder=tmp_path / f"load-{ranks}")
        loaded = {name: tensor for rank in found for name, tensor in rank[0].items()}
        assert differing(loaded, averages) == []
        assert all(rank[1] == {"n_averaged": 4} for rank in found)


def shard_stages(folder: Path) -> dict[str, Any]:
    """Run on each of four ranks: two stages of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = stage_of(2, mesh["pp"].get_local_rank())
    fully_shard(stage, mesh=mesh["dp"])
    ema = averaged(stage)
    export_average(ema, folder / "average.safetensors")
    dcp.save({"ema": ema}, checkpoint_id=folder / "checkpoint")
    resumed: modkit.EMA[Any] = modkit.EMA(stage, decay=0.5)
    load_averages(resumed, folder / "checkpoint")
    assert differing(averages_of(resumed), averages_of(ema)) == []
    return averages_of(ema)


@pytest.mark.distributed
def test_stages_may_be_sharded(tmp_path: Path) -> None:
    """The tensors of the second stage are gathered on its ranks, and sent to the first rank."""
    found = run(4, shard_stages, tmp_path, folder=tmp_path / "run")
    file = load_file(tmp_path / "average.safetensors")

    assert differing(file, found[0] | found[3]) == []


def steps_of(on_nonfinite: Any) -> Iterator[Any]:
    """Update four times, with a bad value of the second stage in the first and third step."""
    group = dist.new_group()
    stage = stage_of(2, dist.get_rank())
    ema: modkit.EMA[Any] = modkit.EMA(
        stage, decay=0.5, on_nonfinite=on_nonfinite, process_group=group
    )
    weight = next(iter(stage.layers.values()))[0].weight
    for step in range(4):
        with torch.no_grad():
            value = torch.nan if step % 2 == 0 and dist.get_rank() == 1 else 1.0
            weight.fill_(value)
        try:
            ema.update()
        except RuntimeError as error:
            yield str(error)
        else:
            yield ema.n_averaged
    if ema.n_averaged:
        # A copy in this process has the group, a pickle does not.
        assert copy.deepcopy(ema)._engine.options.process_group is group
        assert pickle.loads(pickle.dumps(ema))._engine.options.process_group is None
        ema.load_state_dict(ema.state_dict())


def skip_together() -> dict[str, list[Any]]:
    """Run on each of two ranks."""
    return {policy: list(steps_of(policy)) for policy in ("skip", "raise")}


def test_stages_skip_a_step_together(tmp_path: Path) -> None:
    """With process_group=, a bad value of one stage is skipped, or raised, by all stages."""
    first, second = run(2, skip_together, folder=tmp_path)

    assert first["skip"] == second["skip"] == [0, 1, 1, 2]
    assert "EMA: a parameter on another rank is not finite" in first["raise"][0]
    assert "is not finite" in second["raise"][2]
    assert first["raise"][1::2] == second["raise"][1::2] == [1, 2]
