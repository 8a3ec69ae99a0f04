"""Sharded models, as ``fully_shard`` makes them: their tensors are ``DTensor``."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from modkit._upstream import PLAIN


def is_sharded(tensor: object) -> bool:
    """Return True for a ``DTensor``, without importing ``torch.distributed.tensor``."""
    if type(tensor) in PLAIN:
        return False
    # Another thread may be importing it: until the class is there, no tensor is of it.
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return sharded is not None and isinstance(tensor, sharded)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, or the tensor if it is not sharded. No collective."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast("Tensor", cast("Any", tensor).to_local())


MSG_FLATTENED: Final = (
    "FullyShardedDataParallel flattens parameters, so they cannot be averaged by name. Shard the "
    "model with torch.distributed.fsdp.fully_shard"
)
_MSG_PARTITIONED: Final = (
    "DeepSpeed ZeRO-3 partitions parameters, which are empty between steps, so they cannot be "
    "averaged. Use ZeRO-1 or ZeRO-2, with EMA.update() after engine.step(), or shard the model "
    "with torch.distributed.fsdp.fully_shard"
)


def is_flattened(modules: Iterable[torch.nn.Module]) -> bool:
    """Return True if a module is a ``FullyShardedDataParallel`` (FSDP1).

    That class is not imported: until something else has, no module is one.

    In a forward it gives the parameters views of other memory, so a swapped average would not be
    seen, and with ``use_orig_params=False`` there are no parameters of the model's names.
    """
    flattened = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return flattened is not None and any(isinstance(module, flattened) for module in modules)


def check_not_partitioned(owner: str, modules: Iterable[torch.nn.Module]) -> None:
    """Raise TypeError if a model is partitioned by DeepSpeed ZeRO-3.

    It marks the parameters of stage 3, and no others, with an id, also before they are emptied.
    """
    for module in modules:
        if any(hasattr(parameter, "ds_id") for parameter in module._parameters.values()):
            raise TypeError(f"{owner}: {_MSG_PARTITIONED}. Nothing has been changed.")


def check_shards(owner: str, modules: Sequence[torch.nn.Module]) -> None:
    """Raise TypeError if a model is sharded so that its tensors cannot be averaged by name."""
    if is_flattened(modules):
        raise TypeError(f"{owner}: {MSG_FLATTENED}. Nothing has been changed.")
    check_not_partitioned(owner, modules)


def has_shards(model: torch.nn.Module) -> bool:
    """Return True if a parameter of the model is sharded."""
    return any(map(is_sharded, model.parameters()))


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free the full parameters that a forward may have left, so that shards are registered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in modules:
            if isinstance(module, fsdp.FSDPModule):
                cast("Any", module).reshard()


def groups_of(tensors: Iterable[Any], process_group: Any = None) -> list[Any]:
    """Return the groups of ranks that agree on tensors: the given one, or those of their meshes."""
    if process_group is not None:
        return [process_group]
    # All ranks go through the meshes in the same order.
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor))
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    return [mesh.get_group(dimension) for mesh in own for dimension in range(mesh.ndim)]


def true_everywhere(flag: Tensor, groups: Iterable[Any]) -> Tensor:
    """Return True if a flag is true on all ranks: one all-reduce per group.

    The result is on the device of the flag, and is not read on the host.
    """
    number = flag
    for group in groups:
        backends = torch.distributed.get_backend_config(group).split(",")
        devices = [backend.partition(":")[0] for backend in backends]
        device = flag.device.type if flag.device.type in devices else devices[0]
        number = number.to(device, torch.int32)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MIN, group=group)
    return number.to(flag.device, torch.bool)


def are_own_shards(tensors: Iterable[Any], like: Iterable[Any]) -> bool:
    """Return True if all ranks have shards of their own, of tensors that may be from a file.

    It is a collective of the ranks of ``like`` if one is; tensors on a mesh of ``like`` are not.
    """
    shards = [*filter(is_sharded, like)]
    known = {id(tensor.device_mesh) for tensor in shards}
    read = {t.device_mesh for t in tensors if is_sharded(t) and id(t.device_mesh) not in known}
    if not read:
        return True
    is_own = torch.distributed.is_initialized() and all(map(_is_here, read))
    return bool(true_everywhere(torch.tensor(is_own, device="cpu"), groups_of(shards)))


def _is_here(mesh: Any) -> bool:
    """Return True if a mesh has the coordinate of this rank: one from a file has its saver's."""
    if mesh.mesh.max() >= torch.distributed.get_world_size():
        return False
    places = (mesh.mesh == torch.distributed.get_rank()).nonzero().tolist()
    return bool(places == [[*(mesh.get_coordinate() or ())]])


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one, on its mesh's device. This is a collective."""
    if not is_sharded(tensor):
        return tensor
    sharded = cast("Any", tensor)
    # In inference mode, a DTensor cannot be redistributed.
    with torch.inference_mode(False), torch.no_grad():
        # Offloaded shards go to the device of the mesh, where the collective runs.
        return cast("Tensor", sharded.to(sharded.device_mesh.device_type).full_tensor())


def is_sharded_alike(first: Any, second: Any) -> bool:
    """Return True if two tensors have the same placements on the same ranks, or none."""
    if not (is_sharded(first) and is_sharded(second)):
        return is_sharded(first) is is_sharded(second)
    # A mesh that was read from a file is not equal to the one that it was written from.
    same_ranks = first.device_mesh is second.device_mesh or torch.equal(
        first.device_mesh.mesh, second.device_mesh.mesh
    )
    return same_ranks and first.placements == second.placements


def shards_of(value: Tensor, like: Any) -> Tensor:
    """Shard a tensor like another one of the same shape; return it as it is if it is so already.

    Sharding a full tensor, the same on each rank, takes no communication. One with other placements
    is gathered first, which is a collective.
    """
    if is_sharded_alike(value, like):
        return value
    value = whole_tensor(value)
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank, each rank takes its part of its own tensor.
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
