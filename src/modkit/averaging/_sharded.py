"""Models that are split up among processes, as by ``fully_shard``: their tensors are ``DTensor``."""

import sys
from collections.abc import Generator, Mapping
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


def reshard(model: torch.nn.Module) -> None:
    """Have the parameters be the shards again; after a forward they may be whole for a while."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                cast("Any", module).reshard()


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
    return state.full_tensor().cpu() if is_sharded(state) else state


def split_up(state: Any, members: Mapping[str, Tensor]) -> Any:
    """Replace whole tensors by the shards that the tensors of a model with their names have."""
    if isinstance(state, list):
        return [split_up(value, members) for value in state]
    if not isinstance(state, Mapping):
        return state
    return {
        key: _shards_of(value, members.get(key))
        if isinstance(value, Tensor)
        else split_up(value, members)
        for key, value in state.items()
    }


def _shards_of(value: Tensor, like: Any) -> Tensor:
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each process has the whole tensor, and takes its part without asking the others.
    placed = value.to(like.device)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
