"""The state of an ``EMA``: averages, copied buffers, statistics and training weights, by name."""

from collections.abc import Callable, Container, Mapping
from typing import Any

from modkit.migrations.versions import Saved


# Migrates tensors by name, with the metadata of their modules; the result has its own.
MigrateNames = Callable[[dict[str, Any], Saved | None], Any]


def is_average_state(state: Mapping[str, Any]) -> bool:
    """Return True for the state of ``EMA`` or ``EMACallback``."""
    return state.keys() >= {"version", "averages", "schedules"}


def metadata_in(state: Mapping[str, Any], names: Mapping[str, Any]) -> Saved | None:
    """Return the metadata of the modules that have these names, if the state holds versions."""
    versions = state.get("versions")
    if versions is None:
        return None
    # A state leaves out the versions that are 1.
    parts = [name.split(".") for name in names]
    paths = {".".join(part[:end]) for part in parts for end in range(len(part))}
    return {path: {"version": versions.get(path, 1)} for path in {*paths, *versions}}


def tensors_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first average with the copied buffers, as a state dict of the model has them."""
    first: Mapping[str, Any] = next(iter(state["averages"]), {})
    return {**first.get("tensors", {}), **state.get("buffers", {})}


def migrate_averages(
    state: Mapping[str, Any], migrate_names: MigrateNames, buffer_names: Container[str]
) -> dict[str, Any]:
    """Return a state of ``EMA`` whose tensors are migrated, each average as a model's state dict.

    Tensors that do not change stay what they were, averages or copied buffers. What a step makes is
    an average, unless it is one of the model's buffers; where some buffers are averaged it is both,
    and loading takes what the model averages.
    """
    buffers = state.get("buffers", {})
    metadata = metadata_in(state, {**tensors_in(state), **state.get("raw", {})})

    def migrated(*parts: Mapping[str, Any]) -> Any:
        tensors = {name: value for part in parts for name, value in part.items()}
        # An average that has not begun has no tensors, and none is added.
        return migrate_names(tensors, metadata) if tensors else {}

    def replacing(part: Mapping[str, Any], average: Mapping[str, Any]) -> dict[str, Any]:
        """Migrate tensors that stand in for some of an average, without the others."""
        others = {id(value) for value in migrated(average, buffers).values()}
        result = migrated(average, buffers, part)
        return {name: value for name, value in result.items() if id(value) not in others}

    new_state: dict[str, Any] = {**state, "averages": [], "buffers": {}}
    for average in state["averages"]:
        tensors = average.get("tensors", {})
        averages_buffers = any(name in buffer_names for name in tensors)
        is_average = set(map(id, tensors.values()))
        is_copy = set(map(id, buffers.values()))
        new_average = {**average, "tensors": {}}

        result = migrated(tensors, buffers)
        for name, value in result.items():
            is_made = id(value) not in is_average | is_copy
            is_buffer = is_made and name in buffer_names
            if id(value) in is_average or (is_made and (averages_buffers or not is_buffer)):
                new_average["tensors"][name] = value
            if (id(value) in is_copy or is_buffer) and not new_state["averages"]:
                new_state["buffers"][name] = value
        if average.get("statistics"):
            new_average["statistics"] = replacing(average["statistics"], tensors)
        if result:
            saved = {path: entry.get("version") for path, entry in result._metadata.items()}
            new_state["versions"] = {p: v for p, v in saved.items() if not p or v not in (None, 1)}
        new_state["averages"].append(new_average)

    if state.get("raw"):
        new_state["raw"] = replacing(state["raw"], tensors_in(state))
    return new_state
