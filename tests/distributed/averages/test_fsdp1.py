"""The recipe for FullyShardedDataParallel, which modkit.EMA refuses."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode

import modkit
from tests.distributed.launcher import run


RECIPE = Path(__file__).resolve().parents[3] / "examples" / "fsdp1_average.py"
DECAY = 0.9


def state_of(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Return the full state dict in float64."""
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    kind = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return {name: value.double().clone() for name, value in model.state_dict().items()}


def average(use_orig_params: bool, is_mixed: bool) -> dict[str, Any]:
    """Run on each of two ranks: train, and average beside an average in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 5), nn.GELU(), nn.Linear(5, 1))
    model = FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if is_mixed else None,
    )
    with pytest.raises(TypeError, match="fully_shard"):
        modkit.EMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    recipe = runpy.run_path(str(RECIPE))["FlatAverage"](model, DECAY)
    reference: dict[str, Tensor] = {}
    for number in range(5):
        seed = number + 10 * torch.distributed.get_rank()
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()
        with CommDebugMode() as mode:
            recipe.update()
        now = state_of(model)
        kept = DECAY if reference else 0.0
        reference = {n: kept * reference.get(n, now[n]) + (1 - kept) * now[n] for n in now}

    before = state_of(model)
    with recipe.applied():
        inside = state_of(model)
    after = state_of(model)
    return {
        "close": all(torch.allclose(inside[n], reference[n], atol=1e-6) for n in reference),
        "moved": not torch.equal(inside["0.weight"], before["0.weight"]),
        "restored": all(torch.equal(after[n], before[n]) for n in before),
        "collectives": mode.get_total_counts(),
    }


@pytest.mark.distributed
@pytest.mark.parametrize(("use_orig_params", "is_mixed"), [(True, False), (False, True)])
def test_the_recipe_averages_flat_shards(
    use_orig_params: bool, is_mixed: bool, tmp_path: Path
) -> None:
    """The full state in the block is the average, and after it that of the training."""
    for found in run(2, average, use_orig_params, is_mixed, folder=tmp_path):
        assert found == {"close": True, "moved": True, "restored": True, "collectives": 0}
