"""The recipe for DeepSpeed, and what modkit.EMA does with its models."""

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import modkit
from tests.distributed.launcher import run


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"),
]

RECIPE = Path(__file__).resolve().parents[3] / "examples" / "zero_average.py"
DECAY = 0.9


def network() -> nn.Sequential:
    """Return a network, of which ZeRO-3 keeps the smallest parameters gathered."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 5), nn.GELU(), nn.Linear(5, 1))


def engine_of(stage: int, dtype: str) -> Any:
    """Return an engine on the CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # It is a C++ extension, which is not compiled here.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 6},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
    }
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]


def average(stage: int, dtype: str) -> dict[str, Any]:
    """Run on each of two ranks: train, and average beside an average in float64."""
    engine = engine_of(stage, dtype)
    from deepspeed.utils import safe_get_full_fp32_param

    def state() -> dict[str, Tensor]:
        parameters = engine.module.named_parameters()
        return {name: safe_get_full_fp32_param(p).double().clone() for name, p in parameters}

    found: dict[str, Any] = {"error": ""}
    ema: modkit.EMA[Any] | None = None
    try:
        ema = modkit.EMA(engine.module, decay=DECAY)
    except TypeError as error:
        found["error"] = str(error)
    recipe = runpy.run_path(str(RECIPE))["ZeroAverage"](engine, DECAY)
    reference: dict[str, Tensor] = {}
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    for number in range(8):
        seed = 10 * number + torch.distributed.get_rank()
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(kind)
        engine.backward(engine(batch).float().square().mean())
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not is_boundary:
            continue
        with CommDebugMode() as mode:
            recipe.update()
        if ema is not None:
            ema.update()
        now = state()
        kept = DECAY if reference else 0.0
        reference = {n: kept * reference.get(n, now[n]) + (1 - kept) * now[n] for n in now}

    engine.eval()
    batch = torch.ones(2, 8, dtype=kind)
    before = state()
    with torch.no_grad():
        output = engine(batch).clone()
        with recipe.applied():
            inside, averaged = state(), engine(batch).clone()
        found["same output"] = torch.equal(engine(batch), output)
    after = state()
    model = network()
    model.load_state_dict({name: value.float() for name, value in reference.items()})
    with torch.no_grad():
        found["output"] = torch.allclose(model.to(kind)(batch), averaged, atol=1e-5)
    found["close"] = all(torch.allclose(inside[n], reference[n], atol=1e-5) for n in reference)
    found["moved"] = not torch.equal(averaged, output)
    found["restored"] = all(torch.equal(after[n], before[n]) for n in before)
    found["collectives"] = mode.get_total_counts()
    if ema is not None:
        averages = dict(ema.named_averages())
        found["parameters"] = max(
            ((averages[n] - reference[n]).abs().max() / reference[n].abs().max()).item()
            for n in reference
        )
    return found


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_the_recipe_averages_fp32_partitions(stage: int, dtype: str, tmp_path: Path) -> None:
    """The model in the block computes with the average; ZeRO-3 is refused by modkit.EMA."""
    for found in run(2, average, stage, dtype, folder=tmp_path, limit=120.0):
        assert ("DeepSpeed ZeRO-3" in found.pop("error")) == (stage == 3)
        assert found.pop("parameters", 0.0) < 0.01
        assert found.pop("collectives") == 0
        assert found == dict.fromkeys(["same output", "output", "close", "moved", "restored"], True)
