"""Networks for distributed training, once on torch's classes and once on modkit's."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from tests.helpers import Implementation, seed_everything


BATCH = 8


@dataclass(frozen=True)
class Task:
    """A network to train, with its inputs, the paths of its repeated parts, and how layers are split."""

    build: Callable[[Implementation], torch.nn.Module]
    sample: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[torch.nn.Module, Tensor, Tensor], Tensor]
    blocks: tuple[str, ...]
    plan: Callable[[], dict[str, ParallelStyle]]

    def network(self, impl: Implementation) -> torch.nn.Module:
        """Return the network with the weights that it starts with."""
        seed_everything()
        return self.build(impl)


# Numbers in, numbers out.


def numbers(size: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets of a regression."""
    inputs = torch.randn(size, 6)
    return inputs, inputs[:, :3].sin()


def squared_error(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a regression."""
    return torch.nn.functional.mse_loss(model(inputs), targets)


def of_layers(impl: Implementation) -> torch.nn.Module:
    """Make a network of nothing but layers; 7 rows do not divide by 2 or 3."""
    nn = impl.nn
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.GELU()),
        nn.Sequential(nn.Linear(7, 8, bias=False), nn.SiLU(), nn.Linear(8, 7), nn.LayerNorm(7)),
        nn.Sequential(nn.Linear(7, 8, bias=False), nn.SiLU(), nn.Linear(8, 7), nn.Dropout(0.1)),
        nn.Linear(7, 3),
    )


def plan_of_layers() -> dict[str, ParallelStyle]:
    """Shard the two linear layers of each block."""
    return {f"{block}.{index}": style for block in "12" for index, style in _pair("0", "2").items()}


def _pair(first: str, second: str) -> dict[str, ParallelStyle]:
    return {first: ColwiseParallel(), second: RowwiseParallel()}


@functools.cache
def user_classes(nn: ModuleType) -> type[torch.nn.Module]:
    """Define classes as users do, on one of the two libraries."""

    class Block(nn.Module):
        """A residual block, with a parameter and buffers of its own."""

        _version = 3

        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 8)
            self.down = nn.Linear(8, width)
            self.scale = nn.Parameter(torch.full((width,), 0.5))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("mask", torch.ones(width), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.down(torch.tanh(self.up(self.norm(x))))
            if self.training:
                self.seen += len(x)
            return x + self.scale * self.mask.to(x.dtype) * hidden

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 7)
            self.blocks = nn.ModuleList([Block(7) for _ in range(2)])
            self.heads = nn.ModuleDict({"mean": nn.Linear(7, 3)})

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            head: Tensor = self.heads["mean"](x)
            return head

    return Net


def of_classes(impl: Implementation) -> torch.nn.Module:
    """Make a network of the classes of a user."""
    return user_classes(impl.nn)()


def held(impl: Implementation, model: torch.nn.Module) -> torch.nn.Module:
    """Put a third-party model below a user's class, as its attribute ``net``."""

    class Holding(impl.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.net(*args, **kwargs)

    return Holding()


def of_torchs_classes(impl: Implementation) -> torch.nn.Module:
    """Make the same of classes that were written for torch."""
    return held(impl, user_classes(torch.nn)())


def plan_of_classes() -> dict[str, ParallelStyle]:
    """Shard the linear layers of each block."""
    pair = _pair("up", "down")
    return {f"blocks.{block}.{name}": style for block in "01" for name, style in pair.items()}


TASKS: dict[str, Task] = {
    "layers": Task(of_layers, numbers, squared_error, ("0", "1", "2"), plan_of_layers),
    "classes": Task(of_classes, numbers, squared_error, ("blocks.0", "blocks.1"), plan_of_classes),
    "held": Task(
        of_torchs_classes,
        numbers,
        squared_error,
        ("net.blocks.0", "net.blocks.1"),
        lambda: {f"net.{name}": style for name, style in plan_of_classes().items()},
    ),
}


def batch_of(task: Task, step: int, rank: int, ranks: int) -> tuple[Any, ...]:
    """Return the part of the batch of a step that one process has."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(1000 + step)
    sampled = task.sample(BATCH * ranks)
    torch.set_rng_state(generator_state)
    return tuple(part[rank * BATCH : (rank + 1) * BATCH] for part in sampled)
