"""What is in checkpoints and how they fit, as tables."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from modkit.averaging.state import recognise
from modkit.files.checkpoint_files import Checkpoint, dtype_name, file_in, is_safetensors
from modkit.files.safetensors_files import library
from modkit.files.torch_files import read_mapped


# A checkpoint of an optimizer has an entry for each parameter.
MAX_ROWS = 40


@dataclass(frozen=True)
class Entry:
    """One tensor: its name, its shape, its dtype and its size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Group:
    """The tensors directly under one key of a checkpoint.

    Args:
        key: The names on the way to the tensors, joined by dots; empty for the file itself.
        owner: The library whose averages these are, or None if unknown.
        entries: The tensors.
        averageable: True if the key holds nothing else, so that ``key=`` may name it.
    """

    key: str
    owner: str | None
    entries: tuple[Entry, ...]
    averageable: bool

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint.

    Args:
        container: The kind of file: ``"torch"``, ``"safetensors"`` or ``"shards"``.
        groups: The tensors, by key.
        facts: All other entries: the key and the value as text.
    """

    container: str
    groups: tuple[Group, ...]
    facts: tuple[tuple[str, str], ...]


def contents(path: Path) -> Contents:
    """List what is in a checkpoint, without reading tensor data and without executing code.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read as a checkpoint.
    """
    file = file_in(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there")
    if is_safetensors(file):
        return _safetensors(file)
    if file.name.endswith(".index.json"):
        found = Checkpoint(file, None)
        return _flat("shards", ((n, found.shapes[n], found.dtypes[n]) for n in found.shapes))
    parts = list(_walk(read_mapped(file)[0], ""))
    groups = tuple(part for part in parts if isinstance(part, Group))
    return Contents("torch", groups, tuple(part for part in parts if not isinstance(part, Group)))


def _safetensors(file: Path) -> Contents:
    try:
        with library("safetensors").safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - no mapping
            facts = tuple((opened.metadata() or {}).items())
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a checkpoint: {error}") from error
    listed = ((name, found.get_shape(), found.get_dtype()) for name, found in slices)
    return _flat("safetensors", listed, facts)


def _flat(
    container: str,
    listed: Iterable[tuple[str, Iterable[int], str]],
    facts: tuple[tuple[str, str], ...] = (),
) -> Contents:
    """Return the contents of a checkpoint that has nothing but tensors: names, shapes and dtypes."""
    entries: list[Entry] = []
    for name, lengths, dtype in listed:
        shape = tuple(lengths)
        # F8_E4M3 and float8_e4m3fn both have 8 bits; booleans have no number, and take a byte.
        bits = "".join(filter(str.isdigit, dtype.partition("_")[0])) or "8"
        entries.append(Entry(name, shape, dtype, math.prod(shape) * int(bits) // 8))
    return Contents(container, (Group("", None, tuple(entries), averageable=True),), facts)


def _entries(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name, tuple(tensor.shape), dtype_name(tensor), tensor.nbytes)
        for name, tensor in tensors.items()
    )


def _walk(found: Any, key: str) -> Iterator[Group | tuple[str, str]]:
    """Yield the groups of tensors and the other values below a key."""
    if isinstance(found, Tensor):
        yield Group(key, None, _entries({key.rpartition(".")[2]: found}), averageable=False)
        return
    if isinstance(found, Mapping):
        items = [(str(name), value) for name, value in found.items()]
    elif isinstance(found, Sequence) and any(
        isinstance(value, (Tensor, Mapping)) for value in found
    ):
        items = [(str(index), value) for index, value in enumerate(found)]
    else:
        yield key, repr(found)
        return
    tensors = {name: value for name, value in items if isinstance(value, Tensor)}
    owner = _owner(found)
    if tensors or owner:
        whole = isinstance(found, Mapping) and len(tensors) == len(items)
        yield Group(key, owner, _entries(tensors), averageable=whole)
    for name, value in items:
        if not isinstance(value, Tensor):
            yield from _walk(value, f"{key}.{name}" if key else name)


def _owner(found: Any) -> str | None:
    if not isinstance(found, Mapping):
        return None
    state: Mapping[Any, Any] = found
    if {"version", "step", "averages", "schedules"} <= state.keys():
        return "modkit.EMA"
    if all(isinstance(name, str) for name in state):
        return recognise(state)
    return None


def size(count: int) -> str:
    """Write a number of bytes with a prefix that suits it."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def contents_tables(path: Path, found: Contents, key: str | None) -> list[Table]:
    """Return the tables for a checkpoint: what stands under which key, and the tensors of one of them.

    Args:
        path: Where it is.
        found: What it holds.
        key: The key whose tensors are listed; by default they are if there is one group only.
    """
    tables = [_groups(path, found)]
    shown = [group for group in found.groups if group.key == key]
    if key is None and len(found.groups) == 1:
        shown = list(found.groups)
    tables += map(_tensors, shown)
    if found.facts:
        tables.append(_facts(found))
    return tables


def _groups(path: Path, found: Contents) -> Table:
    table = Table(title=f"{escape(str(path))} ({found.container})", title_justify="left")
    table.add_column("--key")
    for heading in ("tensors", "numbers", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("dtypes")
    table.add_column("what")
    for group in found.groups[:MAX_ROWS]:
        numbers = sum(math.prod(entry.shape) for entry in group.entries)
        dtypes = ", ".join(dict.fromkeys(entry.dtype for entry in group.entries))
        what = f"averages of {group.owner}" if group.owner else ""
        name = (group.key or "-") if group.averageable else f"({group.key})"
        counts = f"{len(group.entries):,}", f"{numbers:,}", size(group.nbytes)
        table.add_row(escape(name), *counts, dtypes, what)
    _say_what_is_left_out(table, len(found.groups))
    return table


def _tensors(group: Group) -> Table:
    table = Table(title=f"Tensors of {escape(group.key)}" if group.key else "Tensors")
    for heading in ("name", "shape", "dtype"):
        table.add_column(heading)
    table.add_column("bytes", justify="right")
    for entry in group.entries:
        shape = " x ".join(map(str, entry.shape))
        table.add_row(escape(entry.name), shape, entry.dtype, size(entry.nbytes))
    return table


def _facts(found: Contents) -> Table:
    table = Table(title="Other entries")
    table.add_column("key")
    table.add_column("value", max_width=60, no_wrap=True)
    for key, value in found.facts[:MAX_ROWS]:
        table.add_row(escape(key), escape(value))
    _say_what_is_left_out(table, len(found.facts))
    return table


def _say_what_is_left_out(table: Table, count: int) -> None:
    if count > MAX_ROWS:
        table.add_row(f"… and {count - MAX_ROWS:,} more")


def match_table(paths: Sequence[Path], key: str | None) -> tuple[Table, list[str]]:
    """Compare checkpoints by names and shapes.

    Returns:
        The table, and the names that do not fit.
    """
    shapes = [Checkpoint(path, key).shapes for path in paths]
    names = list(dict.fromkeys(name for each in shapes for name in each))
    table = Table(title=f"{len(paths)} checkpoints", title_justify="left")
    for heading in ("name", "shape", "fits"):
        table.add_column(heading)
    problems: list[str] = []
    for name in names:
        first = shapes[0].get(name)
        others = [
            f"{path.name}: {'missing' if name not in each else ' x '.join(map(str, each[name]))}"
            for path, each in zip(paths, shapes, strict=True)
            if each.get(name) != first
        ]
        shape = "missing" if first is None else " x ".join(map(str, first))
        verdict = f"[red]{escape('; '.join(others))}[/]" if others else "[green]yes[/]"
        table.add_row(escape(name), shape, verdict)
        if others:
            problems.append(name)
    return table, problems


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """Print tables one below the other."""
    for table in tables:
        console.print(table, highlight=False)
