"""``python -m modkit inspect``: what is in a file of a model, with nothing of it run."""

import json
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modkit.cli._inspect_report import amount, as_data
from modkit.jit import _archive


# What the tables need where there is no terminal to ask for its width.
PLAIN_WIDTH: Final = 160


def facts_of(info: _archive.ArchiveInfo) -> Table:
    """Make the table of what is known of the file as a whole."""
    elements = sum({each.storage or each.name: each.nbytes for each in info.tensors}.values())
    rows = {
        "kind": info.kind,
        "size": f"{amount(info.nbytes)} ({info.nbytes:,} bytes)",
        "holds": info.root,
        "format version": info.format_version,
        "bytecode version": info.bytecode_version,
        "tensors": f"{len(info.tensors)}, {amount(elements)}" if info.tensors else None,
        "extra files": ", ".join(f"{name} ({amount(n)})" for name, n in info.extra_files.items()),
        "runs at load": ", ".join(info.runs_at_load),
        "SHA-256": info.sha256,
        "SHA-256 of content": info.content_sha256,
    }
    table = Table(show_header=False, box=None, highlight=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value not in {None, ""}:
            table.add_row(name, escape(str(value)))
    return table


def classes_of(info: _archive.ArchiveInfo) -> Table:
    """Make the table of the classes and their methods."""
    table = Table("class", "base", "methods", highlight=False)
    for each in info.classes:
        table.add_row(*map(escape, (each.name, each.base, ", ".join(each.methods))))
    return table


def tensors_of(info: _archive.ArchiveInfo, limit: int) -> Table:
    """Make the table of the tensors, the first ``limit`` of them."""
    table = Table("tensor", "kind", "shape", "dtype", highlight=False)
    table.add_column("size", justify="right")
    for each in info.tensors[:limit]:
        cells = (each.name, each.kind, str(each.shape), each.dtype, amount(each.nbytes))
        table.add_row(*map(escape, cells))
    return table


def show(info: _archive.ArchiveInfo, limit: int, console: Console) -> None:
    """Print all that is known of the file."""
    console.print(facts_of(info))
    if info.classes:
        console.print(classes_of(info))
    if info.tensors:
        console.print(tensors_of(info, limit))
    left_out = len(info.tensors) - limit
    if left_out > 0:
        console.print(f"and {left_out:,} more tensors; --limit {len(info.tensors)} shows all")


@click.command
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="The most tensors to show in the table.",
)
@click.option("--sha256", metavar="DIGEST", help="Exit with 1 unless the file has this digest.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare what is in a TorchScript archive with its checksums, and exit with 1 where it is "
    "damaged or a file of another kind.",
)
def inspect(file: Path, as_json: bool, limit: int, sha256: str | None, check: bool) -> None:
    """Tell what is in FILE, and run nothing that is in it.

    It knows TorchScript archives, files of torch.save (of old formats too), torch.export and
    safetensors, and names what others are.
    """
    try:
        info = _archive.inspect(file)
        if check:
            _archive.check_archive(file)
    except (RuntimeError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if sha256 is not None and sha256.strip().lower() != info.sha256:
        raise click.ClickException(f"{file} has the SHA-256 {info.sha256}, not {sha256}")
    if as_json:
        click.echo(json.dumps(as_data(info), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    show(info, limit, console)
