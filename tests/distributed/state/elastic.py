"""A training script for torchrun: it writes a checkpoint each step, and resumes from the last one.

The arguments are the library, the folder, and the step before which rank 1 dies in the first attempt.
"""

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import modkit


STEPS = 8


def main(library: str, folder: Path, fatal_step: int) -> None:
    """Train a network with averages, under DistributedDataParallel."""
    nn = importlib.import_module(f"{library}.nn")
    rank, world_size, attempt = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    # A store of its own for each attempt, without the addresses of workers that are gone.
    store = dist.FileStore(str(folder / f"attempt{attempt}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    file = folder / "checkpoint.pt"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.body(x))
            return out

    torch.manual_seed(0)
    net = Net()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    ema = modkit.EMA(net, decay=0.9)
    first = 0
    if file.exists():
        found = modkit.load_checkpoint(file)
        net.load_state_dict(found["net"])
        optimizer.load_state_dict(found["optimizer"])
        ema.load_state_dict(found["ema"])
        first = found["step"]

    for step in range(first, STEPS):
        if step == fatal_step and attempt == 0 and rank == 1:
            os._exit(3)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        ema.update()
        if rank == 0:
            content = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ema": ema.state_dict(),
                "step": step + 1,
                "attempt": attempt,
                "first": first,
            }
            modkit.save_checkpoint(content, file)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
