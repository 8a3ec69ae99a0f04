"""Unevenly sharded models, their training steps, and the counters of the averaging tests."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import modkit
from modkit.averaging.sharding import is_sharded, whole_tensor
from tests.unit.averaging.recipes import as_accelerator


def network(
    dtype: torch.dtype = torch.float32, norm: Callable[[int], nn.Module] = nn.BatchNorm1d
) -> nn.Sequential:
    """Return a network with 7 rows and with 1, which neither 2 nor 3 processes share evenly."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), norm(7), nn.Tanh(), nn.Linear(7, 1))
    return net.to(dtype)


def whole(state: Any) -> Any:
    """Return nested dicts and lists with full tensors in host memory, on each rank."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return whole_tensor(state).cpu() if is_sharded(state) else state


def split(net: nn.Sequential, **options: Any) -> nn.Sequential:
    """Split a network up among all processes: the first layer, and then the rest."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(net[0], mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(net.parameters(), lr=0.1)


def take_step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step on a batch that depends on nothing but its number."""
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    net(batch.to(next(net.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def state_of(net: nn.Module) -> dict[str, Tensor]:
    """Return the whole state of a network, in each process."""
    found: dict[str, Tensor] = whole(dict(net.state_dict()))
    return {name: tensor.clone() for name, tensor in found.items()}


def train(ema: "modkit.EMA[Any]", optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take the steps from ``first`` up to ``last``, with an update after each."""
    for number in range(first, last):
        take_step(ema.model, optimizer, number)
        ema.update()


def trained(steps: int, **options: Any) -> "modkit.EMA[Any]":
    """Return the average of a sharded network after some steps."""
    ema: modkit.EMA[Any] = modkit.EMA(split(network()), **options)
    train(ema, sgd(ema.model), 0, steps)
    return ema


def average_both(
    net: nn.Module, plain: nn.Module, steps: int, **options: Any
) -> "tuple[modkit.EMA[Any], modkit.EMA[Any], torch.optim.Optimizer]":
    """Average a sharded model, and beside it a model with the full weights."""
    ema: modkit.EMA[Any] = modkit.EMA(net, **options)
    reference: modkit.EMA[Any] = modkit.EMA(plain, **options)
    optimizer = sgd(net)
    for number in range(steps):
        take_step(net, optimizer, number)
        ema.update()
        plain.load_state_dict(state_of(net))
        reference.update()
    return ema, reference, optimizer


def averages_of(ema: "modkit.EMA[Any]", index: int = 0) -> dict[str, Tensor]:
    """Return what is averaged, whole and copied, in each process."""
    found: dict[str, Tensor] = whole(dict(ema.named_averages(index)))
    return {name: tensor.clone() for name, tensor in found.items()}


def differing(found: Any, expected: Any, path: str = "") -> list[str]:
    """Return the places at which two nests of dicts, lists and tensors are not equal in all bits."""
    if isinstance(expected, Tensor):
        equal = (
            isinstance(found, Tensor)
            and found.dtype == expected.dtype
            and torch.equal(found, expected)
        )
    elif isinstance(expected, Mapping):
        if set(found) != set(expected):
            return [f"{path}: {sorted(found)} instead of {sorted(expected)}"]
        return [
            p for key in expected for p in differing(found[key], expected[key], f"{path}.{key}")
        ]
    elif isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} instead of {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [p for i, (one, other) in pairs for p in differing(one, other, f"{path}.{i}")]
    else:
        equal = found == expected
    return [] if equal else [path]


class Reads(TorchDispatchMode):
    """Counts how often the host waits for a value, inside of operations on shards too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the shards come first, and note what reads a value."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counted(function: Callable[[], object]) -> tuple[int, int]:
    """Return how many collectives and how many reads of the host a call takes on an accelerator."""
    counts = []
    mode: AbstractContextManager[Any]
    with pytest.MonkeyPatch.context() as patch:
        as_accelerator(patch)
        with CommDebugMode() as mode:
            function()
        counts.append(mode.get_total_counts())
        with Reads() as mode:
            function()
    return counts[0], mode.count
