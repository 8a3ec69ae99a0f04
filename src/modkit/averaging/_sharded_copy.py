"""Copies of models that ``fully_shard`` has split up: torch refuses to make them."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from modkit._upstream import FullyShardCall, class_before_fully_shard, fully_shard_calls
from modkit.averaging._sharded import is_sharded, local_shard, reshard


ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def copy_fully_sharded(model: ModelT, memo: dict[int, Any]) -> ModelT:
    """Return a copy of a model that is split up as the model is; nothing is communicated.

    Each process copies its own shards. At no time is a parameter whole.

    Args:
        model: A model with parts for which ``fully_shard`` was called.
        memo: As of ``deepcopy``: what is not to be copied, by identity.

    Raises:
        ValueError: A parameter is split up in another way as well, as with tensor parallelism.
    """
    reshard(model)
    calls = fully_shard_calls(model)
    parameters = dict(model.named_parameters())
    _check(model, calls, parameters)
    placements: dict[int, Any] = {}
    for parameter in parameters.values():
        if is_sharded(parameter):
            memo[id(parameter)] = room = _room_for(parameter)
            # ``fully_shard`` asks for the dimension that is split; the last one may be of replicas.
            placements[id(room)] = cast("Any", parameter).placements[-1]
    copied = _unsharded_copy(model, calls, memo)
    # With what was inside split up first, as in the model.
    for call in calls:
        call.repeat([memo[id(module)] for module in call.modules], placements)
    _fill(copied, parameters)
    return copied


def _check(
    model: torch.nn.Module, calls: list[FullyShardCall], parameters: Mapping[str, Tensor]
) -> None:
    meshes = [mesh for call in calls for mesh in call.meshes]
    known = all(call.can_be_repeated() for call in calls)
    for name, parameter in parameters.items():
        if is_sharded(parameter) and not (known and cast("Any", parameter).device_mesh in meshes):
            raise ValueError(
                f"{type(model).__name__}: the parameter {name} is split up by more than fully_shard "
                "with one mesh, so the model cannot be copied. modkit.EMA averages it without a copy."
            )


def _room_for(parameter: Tensor) -> torch.nn.Parameter:
    """Return a whole parameter without values."""
    room = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(room, requires_grad=parameter.requires_grad)


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
    # What is inside of those modules has hooks as well.
    for module in copied.modules():
        kept = _without(vars(module), added, hooks)
        vars(module).clear()
        vars(module).update(kept)
    return copied


def _without(state: dict[str, Any], added: set[str], hooks: set[int]) -> dict[str, Any]:
    """Return the state of a module without some attributes and hooks."""
    kept = {key: value for key, value in state.items() if key not in added}
    for key, table in kept.items():
        if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            numbers = [number for number in table if number not in hooks]
            if len(numbers) < len(table):
                kept[key] = type(table)((number, table[number]) for number in numbers)
    return kept


def _fill(copied: torch.nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Give the parameters of a copy, which have no values, those of the model."""

    def materialized(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    shards = [tensor for tensor in parameters.values() if is_sharded(tensor)]
    device = local_shard(shards[0]).device if shards else None
    copied._apply(materialized)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if is_sharded(parameter):
                local_shard(parameter).copy_(local_shard(parameters[name]))
