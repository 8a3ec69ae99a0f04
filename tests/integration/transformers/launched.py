"""The script of each process of a launched training; it writes its final state.

Arguments: the folder of checkpoints, the checkpoint to go on from or "-", and the file to write.
"""

import sys
from pathlib import Path

import torch

from tests.integration.transformers.trainers import (
    At,
    EMACallback,
    average,
    every,
    trainer,
    weights,
)


def main(folder: str, resumed: str, output: str) -> None:
    """Train on one part of each batch, evaluate, and write the weights and averages."""
    seen: list[dict[str, torch.Tensor]] = []
    callback = EMACallback(0.9)
    run = trainer(
        Path(folder),
        callback,
        At("on_prediction_step", lambda _: seen.append(weights(run.model))),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        **every(2, "save", "eval"),
    )
    run.train(resume_from_checkpoint=None if resumed == "-" else resumed)
    assert callback.ema is not None
    rank = run.args.process_index
    content = {
        "world": run.args.world_size,
        "wrapped": type(run.model_wrapped).__name__,
        "counts": [callback.ema.n_averaged, run.state.global_step],
        "raw": weights(run.model),
        "average": average(callback.ema),
        "seen": seen[-1],
        "loss": run.evaluate()["eval_loss"],
        "left": weights(run.model),
    }
    torch.save(content, f"{output}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
