"""Sharded models, as ``fully_shard`` makes them: their tensors are ``DTensor``."""

import copy
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from modkit._upstream import FullyShardCall, class_before_fully_shard, fully_shard_calls


ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def is_sharded(tensor: object) -> bool:
    """Return True for a ``DTensor``, without importing ``torch.distributed.tensor``."""
    # Another thread may be importing it: until the class is there, no tensor is of it.
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return sharded is not None and isinstance(tensor, sharded)


def sharded_places(tensors: Iterable[Tensor]) -> list[int]:
    """Return the positions of the sharded tensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return []
    return [place for place, tensor in enumerate(tensors) if is_sharded(tensor)]


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor; a tensor that is not sharded is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast("Tensor", cast("Any", tensor).to_local())


def has_shards(model: torch.nn.Module) -> bool:
    """Return True if a parameter of the model is sharded."""
    return any(map(is_sharded, model.parameters()))


def sharded_modules(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return those of the modules that ``fully_shard`` was called for."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [m for m in modules if isinstance(m, fsdp.FSDPModule)] if fsdp else []


def is_fully_sharded(model: object) -> bool:
    """Return True for a model with a part for which ``fully_shard`` was called."""
    return isinstance(model, torch.nn.Module) and bool(sharded_modules(model.modules()))


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free the full parameters that a forward may have left, so that the shards are registered."""
    for module in sharded_modules(modules):
        cast("Any", module).reshard()


def meshes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the device meshes of sharded tensors, in the order of the tensors."""
    return list({cast("Any", t).device_mesh: None for t in tensors if is_sharded(t)})


def true_everywhere(flag: Tensor, meshes: Iterable[Any]) -> Tensor:
    """Return True if a flag is true on all ranks: one all-reduce per dimension of the meshes."""
    number = flag
    # All ranks go through the meshes in the same order.
    for mesh in meshes:
        number = number.to(mesh.device_type, torch.int32)
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MIN, group=group)
    return number.to(flag.device, torch.bool)


@contextmanager
def resharded(model: torch.nn.Module) -> Generator[None]:
    """Reshard before and after a block: full parameters would hide what the shards hold."""
    reshard(model.modules())
    try:
        yield
    finally:
        reshard(model.modules())


def whole(state: Any) -> Any:
    """Gather sharded tensors into host memory, in nested dicts and lists. This is a collective."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return whole_tensor(state).cpu() if is_sharded(state) else state


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one. This is a collective."""
    if not is_sharded(tensor):
        return tensor
    # Offloaded shards go to the device of the mesh, where the collective runs.
    sharded = cast("Any", tensor)
    return cast("Tensor", sharded.to(sharded.device_mesh.device_type).full_tensor())


def split_up(state: Any, members: Mapping[str, Tensor], like: Any = None) -> Any:
    """Shard full tensors like the model's tensors of the same names."""
    if isinstance(state, Tensor):
        return shards_of(state, like)
    if isinstance(state, list):
        return [split_up(value, members) for value in state]
    if isinstance(state, Mapping):
        return {key: split_up(value, members, members.get(key)) for key, value in state.items()}
    return state


def shards_of(value: Tensor, like: Any) -> Tensor:
    """Shard a full tensor like another tensor, or return it if that is not sharded."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank, each rank takes its part of its own tensor: no communication.
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def copy_fully_sharded(model: ModelT, memo: dict[int, Any]) -> ModelT:
    """Deep-copy a model with its shards, which torch refuses; ``memo`` is that of ``deepcopy``.

    Each rank copies its own shards, without communication. A parameter that is also sharded in
    another way, such as tensor parallelism, is a ValueError.
    """
    reshard(model.modules())
    calls = fully_shard_calls(model)
    meshes = [mesh for call in calls for mesh in call.meshes]
    known = all(call.can_be_repeated() for call in calls)
    shards = {name: cast("Any", p) for name, p in model.named_parameters() if is_sharded(p)}
    placements: dict[int, Any] = {}
    for name, shard in shards.items():
        if not known or shard.device_mesh not in meshes:
            kind = type(model).__name__
            raise ValueError(
                f"{kind}: parameter {name} is sharded by more than fully_shard with "
                "one mesh, so the model cannot be copied. modkit.EMA averages it without a copy."
            )
        empty = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
        memo[id(shard)] = room = torch.nn.Parameter(empty, requires_grad=shard.requires_grad)
        # ``fully_shard`` takes the dimension that is sharded; the first one may be of replicas.
        placements[id(room)] = shard.placements[-1]
    copied = _unsharded_copy(model, calls, memo)
    # Inner modules first, as in the model.
    for call in calls:
        call.repeat([memo[id(module)] for module in call.modules], placements)
    device = next((local_shard(shard).device for shard in shards.values()), None)

    def materialized(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    cast("Any", copied)._apply(materialized)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if is_sharded(parameter):
                local_shard(parameter).copy_(local_shard(shards[name]))
    return copied


def _unsharded_copy(model: ModelT, calls: list[FullyShardCall], memo: dict[int, Any]) -> ModelT:
    """Return a deep copy as if ``fully_shard`` had never been called for the model."""
    hooks = {number for call in calls for number in call.hooks}
    added = {key for call in calls for key in call.attributes}
    modules = [module for call in calls for module in call.modules]
    states: list[dict[str, Any]] = []
    for module in modules:
        original = class_before_fully_shard(module)
        _, arguments, state, *_ = cast("tuple[Any, ...]", module.__reduce_ex__(4))
        memo[id(module)] = original.__new__(original, *arguments[1:])
        states.append(_without(state, added, hooks))
    for module, state in zip(modules, states, strict=True):
        memo[id(module)].__setstate__(copy.deepcopy(state, memo))
    copied = copy.deepcopy(model, memo)
    # The modules inside have hooks as well.
    for module in copied.modules():
        kept = _without(vars(module), added, hooks)
        vars(module).clear()
        vars(module).update(kept)
    return copied


def _without(state: dict[str, Any], added: set[str], hooks: set[int]) -> dict[str, Any]:
    """Return the state of a module without some attributes and hooks."""
    kept = {key: value for key, value in state.items() if key not in added}
    for key, table in kept.items():
        is_table = key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        if is_table and not hooks.isdisjoint(table):
            kept[key] = type(table)((i, hook) for i, hook in table.items() if i not in hooks)
    return kept
