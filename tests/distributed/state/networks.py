"""A network whose state has versions, old names, and entries that are not tensors."""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers import Implementation, freeze, seed_everything


KINDS = 9


@functools.cache
def classes(nn: ModuleType) -> type[torch.nn.Module]:
    """Define the classes of a user on one of the two libraries."""

    class Scaled(nn.Module):
        """Has had another name for its parameter, and counts in its extra state."""

        _version = 2

        def __init__(self, width: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(width))
            self.calls = 0

        def _load_from_state_dict(
            self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
        ) -> None:
            if metadata.get("version") == 1:
                state_dict[f"{prefix}gain"] = state_dict.pop(f"{prefix}scale")
            super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.gain

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(KINDS, 7)
            self.body = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 7))
            self.norm = nn.BatchNorm1d(7)
            self.scaled = Scaled(7)
            self.last = nn.Linear(7, KINDS, bias=False)
            self.register_buffer("mask", torch.ones(7), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * self.mask
            x = self.scaled(self.norm(x + self.body(x)))
            scores: Tensor = self.last(x)
            return scores

    return Net


def network(impl: Implementation, seed: int = 0) -> torch.nn.Module:
    """Return the network with weights of its own for each seed."""
    seed_everything(seed)
    return classes(impl.nn)()


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """Shard its parameters over all ranks."""
    fully_shard(model.body)
    return fully_shard(model)


def split_layers(model: torch.nn.Module) -> torch.nn.Module:
    """Shard its layers over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


SPREAD: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "fsdp": shard,
    "tp": split_layers,
}


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two states for each parameter."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterator[int] | range
) -> list[float]:
    """Train on the same batches in all processes; return the losses."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        kinds = torch.randint(KINDS, (12,), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(kinds), (kinds + 1) % KINDS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def frozen(value: Any) -> Any:
    """Turn a value into plain data that compares bit by bit, parts of tensors included."""
    if isinstance(value, DTensor):
        parts = freeze(value.detach().to_local())
        return ("DTensor", str(value.placements), tuple(value.shape), value.requires_grad, parts)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return freeze(value)
