"""``python -m modkit inspect``: what is in a file of a model, without executing code from it."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from modkit import files
from modkit.averaging.state import recognise
from modkit.cli._tables import cell, console, one_line_errors, size
from modkit.errors import printable
from modkit.files.kinds import parse_digest


_EMA_STATE = {"version", "step", "averages", "schedules"}


@click.command
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="The most rows of each table.",
)
@click.option("--sha256", metavar="DIGEST", help="Exit with 1 unless the file has this digest.")
@click.option("--check", is_flag=True, help="Exit with 1 unless the file is intact.")
def inspect(file: Path, as_json: bool, limit: int, sha256: str | None, check: bool) -> None:
    """List what is in FILE, without executing code from it.

    FILE is a checkpoint of torch.save, an archive of TorchScript or torch.export, a safetensors file,
    the index of a sharded checkpoint, or a directory that transformers wrote. The column --key names
    what `average --key` accepts. The exit status is 1 for an empty, corrupt or unknown file.
    """
    with one_line_errors():
        wanted = None if sha256 is None else parse_digest(sha256)
        if check:
            files.verify(file, wanted)
        info = files.inspect(file)
        if wanted not in {None, info.sha256}:
            raise click.ClickException(
                f"{printable(str(file))} has the SHA-256 {info.sha256}, not {wanted}"
            )
        if as_json:
            click.echo(json.dumps(asdict(info), indent=2))
        else:
            show(info, limit)
        if info.kind == "unknown file":
            raise click.ClickException("this kind of file is not known")


def show(info: files.FileInfo, limit: int) -> None:
    """Print everything that is known of the file."""
    out = console()
    for table in (
        facts_of(info),
        groups_of(info, limit),
        tensors_of(info, limit),
        entries_of(info, limit),
    ):
        if table.row_count:
            out.print(table)
    longest = max(len(info.tensors), len(info.groups), len(info.entries))
    if longest > limit:
        out.print(f"--limit {longest} shows all rows")


def facts_of(info: files.FileInfo) -> Table:
    """Return the table of facts about the file as a whole."""
    extra = list(info.extra_files.items())
    rows = {
        "file": info.path,
        "kind": info.kind,
        "size": f"{size(info.nbytes)} ({info.nbytes:,} bytes)",
        "format version": info.format_version,
        "tensors": f"{info.n_tensors:,}, {size(info.tensor_nbytes)}" if info.n_tensors else "",
        "extra files": ", ".join(f"{name} ({size(n)})" for name, n in extra[:20]),
        "SHA-256": info.sha256,
        "note": info.note,
    }
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            table.add_row(name, cell(value))
    return table


def groups_of(info: files.FileInfo, limit: int) -> Table:
    """Return the table of the keys that hold tensors, and of the library whose averages they are."""
    tensors = {each.name: each for each in info.tensors}
    table = Table("--key", title="Keys", title_justify="left")
    for heading in ("tensors", "elements", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("dtypes")
    table.add_column("what")
    rows = 0
    for key, names in info.groups.items():
        found = [t for name in names if (t := tensors.get(f"{key}.{name}" if key else name))]
        owner = owner_of(names)
        if not found and not owner:
            continue
        rows += 1
        if rows > limit:
            break
        dtypes = ", ".join(dict.fromkeys(each.dtype for each in found))
        elements = sum(math.prod(each.shape) for each in found)
        nbytes = sum(each.nbytes for each in found)
        # average --key accepts a state dict: nothing but tensors.
        name = (key or "-") if len(found) == len(names) else f"({key or '-'})"
        counts = f"{len(found):,}", f"{elements:,}", size(nbytes)
        table.add_row(cell(name), *counts, cell(dtypes), f"averages of {owner}" if owner else "")
    return table


def owner_of(names: tuple[str, ...]) -> str | None:
    """Return the library whose averages have these names, if it is known."""
    return "modkit.EMA" if set(names) >= _EMA_STATE else recognise(dict.fromkeys(names))


def tensors_of(info: files.FileInfo, limit: int) -> Table:
    """Return the table of the first tensors."""
    table = Table("tensor", "shape", "dtype")
    table.add_column("size", justify="right")
    for each in info.tensors[:limit]:
        table.add_row(cell(each.name), str(each.shape), cell(each.dtype), size(each.nbytes))
    return table


def entries_of(info: files.FileInfo, limit: int) -> Table:
    """Return the table of the first entries that are not tensors."""
    table = Table("other entry", "value")
    for key, value in list(info.entries.items())[:limit]:
        table.add_row(cell(key), cell(value))
    return table
