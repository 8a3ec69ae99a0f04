"""What is in checkpoints and how they fit, as tables."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modkit.averaging.checkpoints import Contents, Group
from modkit.files.checkpoint_files import Checkpoint


# A checkpoint of an optimizer has an entry for each parameter.
MAX_ROWS = 40


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
        numbers = sum(_numel(entry.shape) for entry in group.entries)
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


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


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
