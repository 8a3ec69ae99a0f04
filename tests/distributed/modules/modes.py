"""The ways in which a network is spread over processes."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.modules.tasks import Task


Wrap = Callable[[torch.nn.Module, Task], torch.nn.Module]


@dataclass(frozen=True)
class Mode:
    """One way to spread a network.

    With ``same_data`` each process has the whole batch, which is divided into so many ``parts`` of one step;
    ``ranks`` and ``only`` are the world size and the tasks that it is for.
    """

    wrap: Wrap
    same_data: bool = False
    parts: int = 1
    ranks: int | None = None
    only: tuple[str, ...] = ()
    compiled: bool = False


def waits_to_synchronize(model: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Keep gradients from being exchanged, but for those of the last part of a batch."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def alone(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Leave the network as it is."""
    return model


# One copy of the network in each process.


def ddp(model: torch.nn.Module, task: Task, **options: Any) -> torch.nn.Module:
    """Average the gradients of copies."""
    return DistributedDataParallel(model, **options)


def compiled_ddp(model: torch.nn.Module, task: Task, backend: str) -> torch.nn.Module:
    """Compile the copies with what exchanges the gradients."""
    compiled: Any = torch.compile(DistributedDataParallel(model), backend=backend)
    return compiled


# Forward passes that are done once more in the backward pass.


def recompute(model: torch.nn.Module, task: Task, *, reentrant: bool) -> torch.nn.Module:
    """Put the function that does it in the place of ``forward``, as accelerate does."""
    for path in task.blocks:
        block = model.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    return model


# Sharded parameters.


def shard(model: torch.nn.Module, task: Task, **options: Any) -> torch.nn.Module:
    """Shard the parameters of each block, and then the rest."""
    for path in task.blocks:
        fully_shard(model.get_submodule(path), **options)
    return fully_shard(model, **options)


def shard_in_bf16(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Calculate in bf16, and add up gradients in fp32."""
    narrow = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for path in task.blocks:
        fully_shard(model.get_submodule(path), mp_policy=MixedPrecisionPolicy(**narrow))
    whole = MixedPrecisionPolicy(**narrow, output_dtype=torch.float32)
    return fully_shard(model, mp_policy=whole)


def compiled_shards(model: torch.nn.Module, task: Task, backend: str) -> torch.nn.Module:
    """Compile each block and split it up, as torchtitan does."""
    for path in task.blocks:
        model.get_submodule(path).compile(backend=backend)
    return shard(model, task)


# Sharded layers.


def _all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def tensor_parallel(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Shard layers by rows and by columns."""
    return parallelize_module(model, _all(), task.plan())


def tensor_parallel_and_shard(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Shard layers along one dimension of the mesh, and the rest along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    parallelize_module(model, mesh["layers"], task.plan())
    return shard(model, task, mesh=mesh["data"])


def then(first: Callable[..., torch.nn.Module], second: Wrap, **options: Any) -> Wrap:
    """Do one after the other."""
    return lambda model, task: second(first(model, task, **options), task)


def given(wrap: Callable[..., torch.nn.Module], **options: Any) -> Wrap:
    """Fix the options."""
    return functools.partial(wrap, **options)


MODES: dict[str, Mode] = {
    "alone": Mode(alone, same_data=True),
    "ddp": Mode(ddp),
    "ddp static": Mode(given(ddp, static_graph=True)),
    "ddp accumulates": Mode(ddp, parts=2),
    "ddp recomputes": Mode(then(recompute, ddp, reentrant=False)),
    "ddp compiled": Mode(given(compiled_ddp, backend="aot_eager"), compiled=True),
    "fsdp": Mode(shard),
    # The statistics of BatchNorm are buffers, and stay in 32 bits.
    "fsdp bf16": Mode(shard_in_bf16, only=("classes", "held")),
    "fsdp accumulates": Mode(shard, parts=2),
    "fsdp recomputes reentrant": Mode(then(recompute, shard, reentrant=True)),
    "fsdp compiled": Mode(given(compiled_shards, backend="aot_eager"), compiled=True),
    "tp": Mode(tensor_parallel, same_data=True),
    "tp and fsdp": Mode(tensor_parallel_and_shard, same_data=True, ranks=4),
}
