"""The state of an optimizer whose parameters have names, migrated with the model's."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch

from modkit.errors import MigrationError
from modkit.migrations.steps import Slots


def is_optimizer_state(state_dict: Mapping[str, Any]) -> bool:
    """Return True for a state dict of an optimizer."""
    return set(state_dict) == {"state", "param_groups"}


def migrate_optimizer(
    optimizer_state: Mapping[str, Any],
    migrate_names: Callable[[dict[str, Any]], Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Migrate the state for each parameter, and the names in the groups of parameters.

    The state is what ``get_optimizer_state_dict()`` returns, with names as keys, or the
    ``state_dict()`` of an optimizer with ``param_names``, which numbers them; so is the new one.
    """
    groups: list[dict[str, Any]] = [dict(group) for group in optimizer_state["param_groups"]]
    is_numbered = any(isinstance(key, int) for group in groups for key in group["params"])
    names: dict[Any, str] = {}
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        if is_numbered and "param_names" not in group:
            raise MigrationError(
                "the parameters of this optimizer state have no names: make the optimizer of "
                "model.named_parameters(), or migrate what get_optimizer_state_dict() returns"
            )
        group_names = group["param_names"] if is_numbered else group["params"]
        names.update(zip(group["params"], group_names, strict=True))
        group_of.update(dict.fromkeys(group_names, number))

    state = optimizer_state["state"]
    slots = {name: Slots(state.get(key, {})) for key, name in names.items()}
    migrated = dict(migrate_names(slots))

    # By identity: the name alone has changed.
    old_names = {id(value): name for name, value in slots.items()}
    members: list[list[str]] = [[] for _ in groups]
    in_order = [name for name in parameters if name in migrated]
    for name in dict.fromkeys((*in_order, *migrated)):
        if is_numbered and name not in parameters:
            # Torch loads by position, and the model of another version may have another order.
            raise MigrationError(
                f"{name} is not a parameter of the model, so its number is not known; migrate what "
                "get_optimizer_state_dict() returns"
            )
        old_name = old_names.get(id(migrated[name]))
        if old_name is not None:
            members[group_of[old_name]].append(name)
        elif name in parameters:
            # A tensor that a step has added: the optimizer has no state for it yet.
            if len(groups) > 1:
                raise MigrationError(
                    f"{name} may belong to any of {len(groups)} parameter groups of the optimizer; "
                    "migrate the state of an optimizer with one group"
                )
            members[0].append(name)

    keys: dict[str, Any] = {}
    numbers = count()
    for group, group_names in zip(groups, members, strict=True):
        keys.update((name, next(numbers) if is_numbered else name) for name in group_names)
        group["params"] = [keys[name] for name in group_names]
        if "param_names" in group:
            group["param_names"] = group_names
    new_state = {
        keys[name]: dict(value)
        for name, value in migrated.items()
        if isinstance(value, Slots) and value
    }
    return {"state": new_state, "param_groups": groups}
