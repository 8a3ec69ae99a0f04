"""The ways in which a network is spread over processes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
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

    With ``same_data`` each process has the whole batch; ``ranks`` and ``only`` are the world size and the
    tasks that it is for.
    """

    wrap: Wrap
    same_data: bool = False
    ranks: int | None = None
    only: tuple[str, ...] = ()
    compiled: bool = False


def alone(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Leave the network as it is."""
    return model


# One copy of the network in each process.


def ddp(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Average the gradients of copies."""
    return DistributedDataParallel(model)


def compiled_ddp(model: torch.nn.Module, task: Task, backend: str) -> torch.nn.Module:
    """Compile the copies with what exchanges the gradients."""
    compiled: Any = torch.compile(DistributedDataParallel(model), backend=backend)
    return compiled


# Forward passes that are done once more in the backward pass.


def recompute(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """Put the function that does it in the place of ``forward``, as accelerate does."""
    for path in task.blocks:
        block = model.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
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


def given(wrap: Callable[..., torch.nn.Module], **options: Any) -> Wrap:
    """Fix the options."""
    return functools.partial(wrap, **options)


MODES: dict[str, Mode] = {
    "alone": Mode(alone, same_data=True),
    "ddp": Mode(ddp),
    "ddp recomputes": Mode(lambda model, task: ddp(recompute(model, task), task)),
    "ddp compiled": Mode(given(compiled_ddp, backend="aot_eager"), compiled=True),
    "fsdp": Mode(shard),
    # The statistics of BatchNorm are buffers, and stay in 32 bits.
    "fsdp bf16": Mode(shard_in_bf16, only=("classes", "held")),
    "fsdp compiled": Mode(given(compiled_shards, backend="aot_eager"), compiled=True),
    "tp": Mode(tensor_parallel, same_data=True),
    "tp and fsdp": Mode(tensor_parallel_and_shard, same_data=True, ranks=4),
}
