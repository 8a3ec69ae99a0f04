"""A test for a test suite: the state dicts that a model once had still migrate."""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modkit.errors import MigrationError
from modkit.files.atomic_write import atomic_write
from modkit.migrations.state_dicts import migrate, with_metadata
from modkit.migrations.versions import without_values


def assert_recorded(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Assert that all state dicts that a file has recorded of a model migrate to the present one.

    The file holds names, shapes, dtypes and versions of each recorded state dict, and no weights.
    One whose versions are new is added to the file; the test fails once, so that the file is
    committed. A model whose names depend on options needs one file for each choice.

    Args:
        model: The model, as it is now.
        path: The JSON file; its folder must exist.

    Raises:
        AssertionError: If names, shapes or dtypes have changed although no version has, if a
            recorded state dict does not migrate to the present one, or if the file has just been
            written.
        ValueError: If the file is not one that this function wrote.
        OSError: If the file cannot be read or written.

    Example:
        >>> from modkit import migrations as mig, nn
        >>> path = tmp_path / "linear.json"
        >>> mig.assert_recorded(nn.Linear(2, 1), path)
        Traceback (most recent call last):
        AssertionError: ...linear.json: the versions of Linear are recorded; commit the file
        >>> mig.assert_recorded(nn.Linear(2, 1), path)
    """
    file = Path(path)
    state_dict: Any = model.state_dict()
    versions = {name: metadata.get("version") for name, metadata in state_dict._metadata.items()}
    present = {"versions": versions, "tensors": _described(state_dict)}
    records = _read(file)

    for number, record in enumerate(records, start=1):
        label = f"{file}: state dict {number} of {len(records)}"
        if record["versions"] == versions and record["tensors"] != present["tensors"]:
            difference = _difference(record["tensors"], present["tensors"])
            raise AssertionError(
                f"{label}: {difference}, and no version has changed; declare a migration for it"
            )
        try:
            migrated = _described(migrate(model, _as_state_dict(record)))
        except MigrationError as error:
            raise AssertionError(f"{label}: {error}") from error
        if migrated != present["tensors"]:
            difference = _difference(migrated, present["tensors"])
            raise AssertionError(f"{label} does not migrate: {difference}")

    if present not in records:
        with atomic_write(file) as unfinished:
            unfinished.write_text(json.dumps([*records, present], indent=1), encoding="utf-8")
        name = type(model).__name__
        raise AssertionError(f"{file}: the versions of {name} are recorded; commit the file")


def _described(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return dtype and shape of each tensor."""
    metas = {name: getattr(value, "meta", value) for name, value in sorted(state_dict.items())}
    return {
        name: [str(meta.dtype).removeprefix("torch."), list(meta.shape)]
        for name, meta in metas.items()
        if isinstance(meta, Tensor)
    }


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        # A TypeError for anything but a list.
        records: list[dict[str, Any]] = list.copy(json.loads(file.read_text(encoding="utf-8")))
        for record in records:
            _as_state_dict(record)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{file} was not written by assert_recorded(): {error!r}") from error
    return records


def _as_state_dict(record: Any) -> "OrderedDict[str, Any]":
    """Return a recorded state dict, with tensors that have no values."""
    entries = {
        name: without_values(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for name, (dtype, shape) in record["tensors"].items()
    }
    saved = {name: {"version": version} for name, version in record["versions"].items()}
    return with_metadata(entries, saved)


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the first name in which two descriptions differ, with both."""
    names = old.keys() | new.keys()
    name = min(name for name in names if old.get(name) != new.get(name))
    return f"{name} was {old.get(name, 'absent')} and is {new.get(name, 'absent')}"
