"""Migrating a file without loading it: tensors are read, computed and written one at a time."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modkit.errors import MigrationError
from modkit.files.atomic_write import atomic_write
from modkit.files.safetensors_files import (
    Described,
    in_file_order,
    versions_as_metadata,
    write_safetensors,
)
from modkit.files.tensor_files import Checkpoint
from modkit.migrations.state_dicts import Versions, migrate_with_record, plan, with_metadata
from modkit.migrations.steps import Change, Lazy


def migrate_file(
    model: torch.nn.Module,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: str | None = None,
    to: Mapping[type, int] | None = None,
    versions: Versions | None = None,
) -> list[str]:
    """Migrate the state dict in a file into a safetensors file.

    Tensors are read, computed and written one at a time, so the file may be larger than memory. The
    target is written atomically: it is the previous file or the complete new one. It holds the
    versions of modules in its metadata, which this function and ``average_checkpoints`` read.

    Args:
        model: The model; one on the meta device is enough, unless a function of the user needs its
            values.
        source: A file of ``torch.save`` or safetensors, the ``.index.json`` of shards, or a
            directory that transformers wrote.
        target: The safetensors file to write.
        key: Path of the state dict in a torch file: ``"model"``.
        to: As in ``migrate``.
        versions: As in ``migrate``.

    Returns:
        One line for each change, as ``plan`` returns them.

    Raises:
        ValueError: If the target's name does not end in ``.safetensors``, or a dtype has no name
            there.
        MigrationError: As ``migrate``, or if a function returns another shape or dtype than on meta
            tensors.
        FileError: If the source is not an intact state dict.
        OSError: If a file cannot be read or written.

    Example:
        >>> import modkit, torch
        >>> from modkit import migrations as mig
        >>> @mig.declare({2: [mig.rename("fc.*", "head.*")]})
        ... class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(2, 1, bias=False)
        >>> folder = tmp_path
        >>> torch.save({"fc.weight": torch.ones(1, 2)}, folder / "old.pt")
        >>> mig.migrate_file(Net(), folder / "old.pt", folder / "new.safetensors")
        ['(root): Net 1 -> 2: rename fc.weight [1, 2] -> head.weight [1, 2]']
    """
    if Path(target).suffix != ".safetensors":
        raise ValueError(
            f"migrate_file: target must end in .safetensors, got {os.fspath(target)!r}"
        )
    file = Checkpoint(Path(source), key=key)
    record: list[Change] = []
    result = migrate_with_record(model, _state_dict(file), record, to=to, versions=versions)
    lines = [str(change) for change in record]

    values = {name: _as_lazy(name, value) for name, value in result.items()}
    described = in_file_order(
        {name: Described(lazy.meta.dtype, tuple(lazy.meta.shape)) for name, lazy in values.items()}
    )
    metadata = versions_as_metadata(result._metadata)  # type: ignore[attr-defined]
    # The tensors are freed as they are written.
    result.clear()
    record.clear()
    with atomic_write(target) as unfinished:
        write_safetensors(unfinished, described, _read_all(values, described), metadata)
    return lines


def plan_file(
    model: torch.nn.Module,
    source: str | os.PathLike[str],
    *,
    key: str | None = None,
    to: Mapping[type, int] | None = None,
    versions: Versions | None = None,
) -> list[str]:
    """Return what ``migrate_file`` would do, one line for each change; no tensor is read."""
    entries = _state_dict(Checkpoint(Path(source), key=key))
    return plan(model, entries, to=to, versions=versions)


def _state_dict(file: Checkpoint) -> "OrderedDict[str, Any]":
    """Return the tensors of a file, which are read on demand."""
    entries: dict[str, Any] = {
        name: Lazy(
            torch.empty(shape, dtype=file.dtype(name), device="meta"), partial(file.tensor, name)
        )
        for name, shape in file.shapes.items()
    }
    return with_metadata(entries, file.versions or None)


def _as_lazy(name: str, value: Any) -> Lazy:
    if isinstance(value, Lazy):
        return value
    if value.is_meta:
        raise MigrationError(
            f"{name} is on the device meta: its default needs the model's values; pass a model "
            "with values"
        )
    return Lazy(value.to("meta"), value.cpu)


def _read_all(
    values: dict[str, Lazy], described: Mapping[str, Described]
) -> Iterator[tuple[str, Tensor]]:
    for name, expected in described.items():
        tensor = values.pop(name).read()
        if (tensor.dtype, tuple(tensor.shape)) != tuple(expected):
            raise MigrationError(
                f"{name}: the step returned {tensor.dtype} {list(tensor.shape)}, but "
                f"{expected.dtype} {list(expected.shape)} on meta tensors"
            )
        yield name, tensor
        del tensor
