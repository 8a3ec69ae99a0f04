"""Models that are split up among processes, as by ``fully_shard``: their tensors are ``DTensor``."""

import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


def is_sharded(tensor: object) -> bool:
    """Tell whether a tensor has its values in several processes.

    Importing what makes such tensors takes long; who has some has imported it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the values that this process has; of a tensor that is not split up, the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = cast("Any", tensor).to_local()
    return shard


def has_shards(model: torch.nn.Module) -> bool:
    """Tell whether a model is split up."""
    return any(map(is_sharded, model.parameters()))


def sharded_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that ``fully_shard`` was called for, or that were called with others."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def is_fully_sharded(model: object) -> bool:
    """Tell whether something is a model, and ``fully_shard`` was called for a part of it."""
    return isinstance(model, torch.nn.Module) and bool(sharded_modules(model))


def reshard(model: torch.nn.Module) -> None:
    """Have the parameters be the shards again; after a forward they may be whole for a while."""
    for module in sharded_modules(model):
        cast("Any", module).reshard()


def meshes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the meshes of processes that tensors are split up among, in the order of the tensors."""
    return list({cast("Any", t).device_mesh: None for t in tensors if is_sharded(t)})


def true_everywhere(flag: Tensor, meshes: Iterable[Any]) -> Tensor:
    """Return whether a truth value is true in all processes of the meshes.

    Without meshes nobody is asked. Otherwise one number is exchanged, on the device.
    """
    number = flag
    # Every process goes through them in the same order.
    for mesh in meshes:
        number = number.to(torch.int32)
        number = number.to(mesh.device_type)
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MIN, group=group)
    return number.to(flag.device, torch.bool)


@contextmanager
def resharded(model: torch.nn.Module) -> Generator[None]:
    """Have the parameters be the shards before and after a block.

    Whole parameters that are left from before would be used instead of what the shards hold now.
    """
    reshard(model)
    try:
        yield
    finally:
        reshard(model)


def whole(state: Any) -> Any:
    """Replace the tensors that are split up by whole ones in host memory, in dicts and lists too.

    All processes have to do this, as they give one another their shards.
    """
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return whole_tensor(state).cpu() if is_sharded(state) else state


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all values of a tensor; all processes have to do this."""
    if not is_sharded(tensor):
        return tensor
    split: Any = tensor
    # Shards that are kept in host memory go where the processes exchange them.
    found: Tensor = split.to(split.device_mesh.device_type).full_tensor()
    return found


def split_up(state: Any, members: Mapping[str, Tensor]) -> Any:
    """Replace whole tensors by the shards that the tensors of a model with their names have."""
    if isinstance(state, list):
        return [split_up(value, members) for value in state]
    if not isinstance(state, Mapping):
        return state
    return {
        key: shards_of(value, members.get(key))
        if isinstance(value, Tensor)
        else split_up(value, members)
        for key, value in state.items()
    }


def shards_of(value: Tensor, like: Any) -> Tensor:
    """Replace a whole tensor by the shards that another one has, or return it as it is."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each process has the whole tensor, and takes its part without asking the others.
    placed = value.to(like.device)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
