"""The state of an optimizer whose parameters have names, migrated with the model's."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from modkit.errors import MigrationError
from modkit.migrations.steps import Slots


State = dict[str, Any]


def is_optimizer_state(state_dict: Mapping[str, Any]) -> bool:
    """Return True for a state dict of an optimizer."""
    return set(state_dict) == {"state", "param_groups"}


def migrate_optimizer(
    optimizer_state: Mapping[str, Any],
    migrate_names: Callable[[dict[str, Any]], Mapping[str, Any]],
    parameters: list[str],
) -> State:
    """Migrate the state for each parameter, and the names in the groups of parameters.

    Args:
        optimizer_state: What ``get_optimizer_state_dict()`` returns, with names as keys, or the
            ``state_dict()`` of an optimizer with ``param_names``, which numbers them.
        migrate_names: Migrates a dict by the names of parameters.
        parameters: The names of the model's parameters, in order.

    Raises:
        MigrationError: If parameters have no names, or those of one new tensor are in several groups.
    """
    groups: list[dict[str, Any]] = [dict(group) for group in optimizer_state["param_groups"]]
    is_numbered = any(isinstance(key, int) for group in groups for key in group["params"])
    names: dict[Any, str] = {}
    for group in groups:
        if is_numbered and "param_names" not in group:
            raise MigrationError(
                "the parameters of this optimizer state have no names: make the optimizer of "
                "model.named_parameters(), or migrate what get_optimizer_state_dict() returns"
            )
        own_names = group["param_names"] if is_numbered else group["params"]
        names.update(zip(group["params"], own_names, strict=True))

    state = optimizer_state["state"]
    slots = {name: Slots(state.get(key, {}), (name,)) for key, name in names.items()}
    migrated: dict[str, Any] = dict(migrate_names(slots))
    homes = {names[key]: number for number, group in enumerate(groups) for key in group["params"]}
    members = _members(migrated, slots, homes, parameters, len(groups))

    numbers: dict[str, Any] = {}
    for group, own_names in zip(groups, members, strict=True):
        numbers.update(zip(own_names, count(len(numbers))))
        group["params"] = [numbers[name] if is_numbered else name for name in own_names]
        if "param_names" in group:
            group["param_names"] = own_names
    new_state = {
        numbers[name] if is_numbered else name: dict(value)
        for name, value in migrated.items()
        if isinstance(value, Slots) and value
    }
    return {"state": new_state, "param_groups": groups}


def _members(
    migrated: Mapping[str, Any],
    slots: Mapping[str, Slots],
    homes: Mapping[str, int],
    parameters: list[str],
    groups: int,
) -> list[list[str]]:
    """Return the names in each group, in the order of the model."""
    members: list[list[str]] = [[] for _ in range(groups)]
    for name in dict.fromkeys((*(each for each in parameters if each in migrated), *migrated)):
        value = migrated[name]
        if not isinstance(value, Slots):
            # A tensor that a step has added: the optimizer has no state for it yet.
            if name not in parameters:
                continue
            found = {*range(groups)}
        else:
            found = {homes[source] for source in value.sources}
        if len(found) != 1:
            raise MigrationError(
                f"{name} may belong to any of {len(found)} parameter groups of the optimizer; migrate the "
                "state of an optimizer with one group"
            )
        members[found.pop()].append(name)
    return members
