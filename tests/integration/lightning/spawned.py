"""A script with `ddp_spawn`: spawned processes import it, and not pytest, again.

Argument: the folder for what each process, and the script at the end, finds.
"""

import sys
from pathlib import Path

import torch

from tests.integration.lightning import runs


def main(folder: Path) -> None:
    """Train on two spawned processes, without interruption and from a checkpoint of the middle."""
    for name, resume in (("whole", None), ("resumed", folder / "mid-epoch.ckpt")):
        place = folder / name
        place.mkdir()
        ema = runs.EMACallback(decay=0.9, swap_to_average_at_end=True)
        savers = [runs.Saver(folder)] if resume is None else []
        options = {"devices": 2, "strategy": "ddp_spawn", "accumulate_grad_batches": 2}
        report = runs.Report(place, ema)
        net, _, _ = runs.fit(place, *savers, ema=ema, after=[report], resume=resume, **options)
        torch.save({"weight": net.net[0].weight.detach(), "stayed": ema.ema is None}, place / "end")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
