"""The Trainer with FSDP2, on two ranks without an accelerator."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.averages.networks import averages_of, differing, state_of
from tests.distributed.launcher import run


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]

ON_CPU = {"ddp_backend": "gloo", "learning_rate": 0.01, "per_device_train_batch_size": 2}


def shard_on_cpu(kind: str) -> dict[str, Any]:
    """Let accelerate shard a model on CPUs, which it does on accelerators only."""
    import accelerate
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    # As torchrun sets it; the group is there already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    AcceleratorState._reset_state(True)
    real = accelerate.Accelerator.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        real(self, *args, **options)
        for state in (AcceleratorState._shared_state, PartialState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        self.state.fsdp_plugin = fsdp_plugin

    if real.__name__ != "init":
        accelerate.Accelerator.__init__ = init
    config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["GPT2Block"],
        "state_dict_type": kind,
        "cpu_ram_efficient_loading": False,
    }
    return {"fsdp": True, "fsdp_config": config, "max_steps": 8, **ON_CPU}


def reshard(model: torch.nn.Module) -> torch.nn.Module:
    """Drop the full parameters that a forward has left."""
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()
    return model


class Run:
    """A training of 8 steps with checkpoints and evaluations at the 4th and the 8th."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        from tests.integration.transformers.trainers import At, EMACallback, every, trainer

        self.reference: dict[str, Any] = {}
        self.callback = EMACallback(0.9)
        options |= {**shard_on_cpu(kind), **every(4, "save", "eval")}
        self.trainer = trainer(folder, self.callback, At("on_step_end", self.follow), **options)

    def follow(self, step: int) -> None:
        """Average the full parameters in float64."""
        now = self.weights()
        kept = 0.0 if step == 1 else 0.9
        for name, value in now.items():
            before = self.reference.get(name, value.double())
            self.reference[name] = kept * before + (1 - kept) * value.double()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the full training weights."""
        names = dict(self.trainer.model.named_parameters())
        state = state_of(reshard(self.trainer.model))
        return {name: value for name, value in state.items() if name in names}

    def averages(self) -> dict[str, torch.Tensor]:
        """Return the full averages."""
        return averages_of(self.callback.ema)

    def losses(self) -> list[float]:
        """Return the losses of the evaluations."""
        history = self.trainer.state.log_history
        return [entry["eval_loss"] for entry in history if "eval_loss" in entry]


def train(folder: Path, kind: str) -> dict[str, Any]:
    """Run on each of two ranks: train, save, resume, and load the best checkpoint."""
    from tests.integration.transformers.trainers import transformers

    through = Run(folder / "through", kind)
    through.trainer.train()
    averages, weights = through.averages(), through.weights()
    found: dict[str, Any] = {
        "close": all(
            torch.allclose(averages[name].double(), value, atol=1e-6)
            for name, value in through.reference.items()
        ),
        "evaluated": through.trainer.evaluate()["eval_loss"] == through.losses()[1],
        "files": sorted(path.name for path in (folder / "through/checkpoint-8").iterdir()),
    }
    with through.callback.evaluating_training_weights():
        found["evaluated raw"] = through.trainer.evaluate()["eval_loss"] != through.losses()[1]
    if kind == "FULL_STATE_DICT":
        saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "through/checkpoint-8")
        tensors = {name: p.detach() for name, p in saved.named_parameters()}
        found["pretrained"] = differing(tensors, {name: averages[name] for name in tensors})

    if dist.get_rank() == 0:
        shutil.copytree(folder / "through/checkpoint-4", folder / "resumed/checkpoint-4")
    dist.barrier()
    resumed = Run(folder / "resumed", kind)
    resumed.trainer.train(resume_from_checkpoint=True)
    found["resumed"] = differing(resumed.averages(), averages)
    found["resumed weights"] = differing(resumed.weights(), weights)
    found["steps"] = resumed.callback.ema.n_averaged if resumed.callback.ema else 0

    best = Run(
        folder / "best",
        kind,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    best.trainer.train()
    first = max(range(2), key=best.losses().__getitem__)
    found["best"] = best.callback.ema is not None and best.callback.ema.n_averaged == 4 + 4 * first
    found["best loss"] = best.trainer.evaluate()["eval_loss"] == best.losses()[first]

    # accelerate makes no plugin for FSDP1 without an accelerator.
    best.trainer.accelerator.state.fsdp_plugin.fsdp_version = 1
    with pytest.raises(NotImplementedError, match="'version': 2"):
        best.trainer.train()
    return found


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_training(kind: str, tmp_path: Path) -> None:
    """It evaluates, saves and resumes the average shard by shard; FSDP1 is refused."""
    full = {"pretrained": []} if kind == "FULL_STATE_DICT" else {}
    right = ["close", "evaluated", "evaluated raw", "best", "best loss"]
    for found in run(2, train, tmp_path / "runs", kind, folder=tmp_path / "ranks", limit=200.0):
        files = found.pop("files")
        assert {"ema", "optimizer.bin" if full else "optimizer_0"} <= set(files)
        assert ("model.safetensors" in files) == bool(full)
        assert found == {
            **dict.fromkeys(right, True),
            **full,
            "resumed": [],
            "resumed weights": [],
            "steps": 8,
        }
