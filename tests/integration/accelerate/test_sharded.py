"""The loop of docs/callbacks.md with FSDP2, on two ranks without an accelerator."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.distributed import FullState
from tests.distributed.averages.networks import averages_of, differing, state_of
from tests.distributed.launcher import run


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
]


def accelerator_of(kind: str) -> Any:
    """Return an accelerator that shards on CPUs, which accelerate does on accelerators only."""
    import accelerate
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    # As torchrun sets it; the group is there already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type=kind,
        auto_wrap_policy="size_based_wrap",
        min_num_params=30,
        cpu_ram_efficient_loading=False,
    )
    return accelerator


def prepared(kind: str) -> Any:
    """Return an accelerator, a sharded model with uneven rows, its optimizer and averages."""
    accelerator = accelerator_of(kind)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 15), nn.ReLU(), nn.Linear(15, 15), nn.Linear(15, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    ema = modkit.EMA(model, decay=0.9).attach(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(FullState(ema))
    return accelerator, model, optimizer, ema


def train(kind: str, folder: Path) -> dict[str, Any]:
    """Run on each of two ranks: train, save as the average and in full, and load."""
    accelerator, model, optimizer, ema = prepared(kind)
    for number in range(8):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    averages, weights = averages_of(ema), state_of(model)
    with ema.applied():
        accelerator.save_model(model, folder / "average")
    accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()

    accelerator, model, optimizer, resumed = prepared(kind)
    accelerator.load_state(folder / "state")
    return {
        "counts": (ema.n_averaged, resumed.n_averaged),
        "averages": differing(averages_of(resumed), averages),
        "weights": differing(state_of(model), weights),
        "average": averages,
    }


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_loop(kind: str, tmp_path: Path) -> None:
    """The state that rank 0 saves has the averages of all ranks, and loads on each of them."""
    from safetensors.torch import load_file

    for found in run(2, train, kind, tmp_path, folder=tmp_path / "run", limit=120.0):
        average = found.pop("average")
        assert found == {"counts": (4, 4), "averages": [], "weights": []}
    assert differing(load_file(tmp_path / "average/model.safetensors"), average) == []
