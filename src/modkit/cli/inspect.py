"""``modkit inspect``: the content of a model file, without executing code from it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.filesize import decimal
from rich.table import Table

from modkit import files
from modkit.cli import _tables as ui
from modkit.errors import printable
from modkit.files.inspect import NEVER_INTACT


@click.command(epilog=ui.EPILOG)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=ui.INPUT)
@ui.json_option
@click.option("--limit", type=click.IntRange(0), default=100, help="Maximum rows per table [100].")
def inspect(paths: tuple[Path, ...], as_json: bool, limit: int) -> None:
    """List the content of each PATH, without executing code from it.

    PATH is a checkpoint of torch.save, a TorchScript or torch.export archive, a safetensors file,
    the index of a sharded checkpoint, or a directory with one checkpoint. Tensors are not read: the
    command verify does that. The column --key lists the keys for --key of the other commands. An
    empty, corrupt or unknown file, and one that is not a model, is an error.

    \b
    Examples:
      modkit inspect model.pt
      modkit inspect model.pt --limit 20
      modkit inspect model-*.safetensors --json
    """  # noqa: D301
    contents = [_described(path, limit=limit, as_json=as_json) for path in paths]
    if as_json:
        ui.print_json(contents if len(paths) > 1 else contents[0])

    # Last, so that one bad file does not hide the content of the others.
    errors = [content["error"] for content in contents if "error" in content]
    for text in errors:
        click.echo(f"Error: {printable(text)}", err=True)
    if errors:
        raise click.exceptions.Exit(1)


def _described(path: Path, *, limit: int, as_json: bool) -> dict[str, Any]:
    """Return the content of a file as plain data, with an error if it is not a model.

    Without ``as_json``, it is shown as tables.
    """
    try:
        with ui.progress(f"reading {path.name}"):
            info = files.inspect(path, hashed=False)
    except ui.ERRORS as error:
        return {"path": str(path), "error": ui.one_line(error)}

    if not as_json:
        show(info, limit)
    content = asdict(info)
    # The digest, for which the whole file is read, is in the result of verify.
    del content["sha256"]
    # The tables say what the file is; the error is for scripts, which would go on to load it.
    if info.kind in NEVER_INTACT:
        content["error"] = f"{path}: {info.kind}, not a model"
    return content


def show(info: files.FileInfo, limit: int) -> None:
    """Print the content of a file as tables with at most ``limit`` rows."""
    size = decimal(info.nbytes)
    facts = {
        "file": info.path,
        "kind": info.kind,
        # Rich writes sizes below 1,000 in bytes already.
        "size": f"{size} ({info.nbytes:,} bytes)" if info.nbytes >= 1000 else size,
        "tensors": f"{len(info.tensors):,}" if info.tensors else "",
        "note": info.note,
    }

    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, ui.cell(value))
    ui.console().print(table)

    tensors = [
        (tensor.name, tensor.shape, tensor.dtype, decimal(tensor.nbytes)) for tensor in info.tensors
    ]
    tables: dict[tuple[str, ...], Sequence[tuple[object, ...]]] = {
        ("--key", "tensors"): _keys_of(info),
        ("tensor", "shape", "dtype", "size"): tensors,
        ("other entry", "value"): list(info.entries.items()),
    }
    ui.print_tables(tables, limit)


def _keys_of(info: files.FileInfo) -> list[tuple[object, ...]]:
    """Return a row for each key with tensors.

    Keys in parentheses also hold other entries.
    """
    sizes = {tensor.name: tensor.nbytes for tensor in info.tensors}
    rows: list[tuple[object, ...]] = []
    for key, names in info.groups.items():
        paths = [f"{key}.{name}" if key else name for name in names]
        tensor_sizes = [sizes[path] for path in paths if path in sizes]
        if tensor_sizes:
            shown_key = key or "-"
            has_other_entries = len(tensor_sizes) < len(names)
            summary = f"{len(tensor_sizes):,}, {decimal(sum(tensor_sizes))}"
            rows.append((f"({shown_key})" if has_other_entries else shown_key, summary))
    return rows
