"""Train an FSDP2-sharded network, and average its weights shard by shard.

    torchrun --nproc-per-node 2 examples/fsdp_ema.py               # on CPUs, or one GPU per rank
    torchrun --nproc-per-node 3 examples/fsdp_ema.py --steps 600   # resumes with three ranks

Each rank stores its shards of the average. A run writes a checkpoint every 100 steps, which can be resumed with
any world size, and ``average.safetensors``: the averaged weights in one file, for single-process inference.
The data are the 1,797 images of handwritten digits in scikit-learn.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modkit import EMA, nn
from modkit.distributed import export_average, load_averages


parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument(
    "--steps", type=int, default=300, help="total number of steps, earlier runs included"
)
parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
parser.add_argument("--batch", type=int, default=96, help="images per step, over all ranks")
parser.add_argument("--out", type=Path, default=Path("out/fsdp"), help="folder for the results")


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the output of the layers."""
        changed: Tensor = self.layers(self.norm(x))
        return x + changed


def build(device: torch.device) -> nn.Sequential:
    """Return the network with each block sharded, and then the rest."""
    torch.manual_seed(0)
    blocks = [Block(66) for _ in range(3)]
    net = nn.Sequential(nn.Linear(64, 66), *blocks, nn.LayerNorm(66), nn.Linear(66, 10)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def part_of(rows: Tensor) -> Tensor:
    """Return this rank's part of some rows; the first ranks may get one row more."""
    return rows.tensor_split(dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy over all ranks."""
    right = (net(part_of(images)).argmax(1) == part_of(labels)).sum()
    dist.all_reduce(right)
    return int(right) / len(labels)


def newest(out: Path) -> Path | None:
    """Return the newest complete checkpoint; an incomplete one has no metadata."""
    finished = [path.parent for path in out.glob("step-*/.metadata")]
    return max(finished, default=None)


def store(
    path: Path, step: int, net: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA[Any]
) -> None:
    """Write each rank's shards of the weights, of the optimizer and of the average."""
    model, moments = get_state_dict(net, optimizer)
    save({"step": step, "model": model, "optimizer": moments, "ema": ema}, checkpoint_id=path)


def resume(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA[Any]) -> int:
    """Load a checkpoint that was written with any world size; return its step."""
    model, moments = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"step": 0, "model": model, "optimizer": moments}
    load(state, checkpoint_id=path)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    load_averages(ema, path)
    step: int = state["step"]
    return step


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Initialize the process group that torchrun started; yield the device of this rank."""
    accelerated = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if accelerated else torch.device("cpu")
    )
    if accelerated:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if accelerated else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def main(device: torch.device) -> None:
    """Resume from the newest checkpoint, and train."""
    options = parser.parse_args()
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(data.target, device=device)
    train, test = slice(0, 1400), slice(1400, None)

    net = build(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    ema = EMA(net, decay=0.98).attach(optimizer)
    found = newest(options.out)
    step = resume(found, net, optimizer, ema) if found is not None else 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from step {step}")
    while step < options.steps:
        # Every rank draws the same rows, also after a resume.
        generator = torch.Generator().manual_seed(step)
        rows = part_of(torch.randint(1400, (options.batch,), generator=generator)).to(device)
        loss = nn.functional.cross_entropy(net(images[train][rows]), labels[train][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % options.every == 0 or step == options.steps:
            store(options.out / f"step-{step:06d}", step, net, optimizer, ema)
            raw = accuracy(net, images[test], labels[test])
            with ema.applied():
                average = accuracy(net, images[test], labels[test])
            if dist.get_rank() == 0:
                print(f"step {step}: accuracy {raw:.2%}, {average:.2%} with averaged weights")
    export_average(ema, options.out / "average.safetensors")
    if dist.get_rank() == 0:
        print(f"The averaged weights are in {options.out / 'average.safetensors'}")


if __name__ == "__main__":
    with process_group() as device:
        main(device)
