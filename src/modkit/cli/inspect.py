"""``modkit inspect``: the content of a model file, without executing code from it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click
from rich.filesize import decimal
from rich.table import Table

from modkit import files
from modkit.averaging.foreign_states import recognise
from modkit.cli import _tables as ui
from modkit.errors import printable
from modkit.files.inspect import NEVER_INTACT, check_file, parts_of
from modkit.files.kinds import other_file, parse_digest
from modkit.files.tensor_files import file_in


def _digest(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Read a SHA-256."""
    try:
        return None if value is None else parse_digest(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


# Entries of EMA.state_dict().
_EMA_STATE: Final = {"version", "step", "averages", "schedules"}


@click.command(epilog=ui.EPILOG)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=ui.INPUT)
@ui.json_option
@click.option("--limit", type=click.IntRange(0), default=100, help="Maximum rows per table [100].")
@click.option(
    "--sha256", metavar="DIGEST", callback=_digest, help="Fail unless this is its digest."
)
@click.option("--check", is_flag=True, help="Fail unless each file is intact; show its SHA-256.")
def inspect(
    paths: tuple[Path, ...], as_json: bool, limit: int, sha256: str | None, check: bool
) -> None:
    """List the content of each PATH, without executing code from it.

    PATH is a checkpoint of torch.save, a TorchScript or torch.export archive, a safetensors file,
    the index of a sharded checkpoint, or a directory with one checkpoint. Only --check and --sha256
    read the tensors. The column --key lists the keys for --key of the other commands. An empty,
    corrupt or unknown file, and one that is not a model, is an error.

    \b
    Examples:
      modkit inspect model.pt
      modkit inspect model.pt --check --sha256 5f2c...
      modkit inspect model-*.safetensors --json
    """  # noqa: D301
    if sha256 is not None and len(paths) > 1:
        raise click.UsageError("--sha256 is for one file; `modkit verify --sha256sums` is for many")
    contents = [
        _described(path, limit=limit, sha256=sha256, check=check, as_json=as_json) for path in paths
    ]
    if as_json:
        ui.print_json(contents if len(paths) > 1 else contents[0])

    # Last, so that one bad file does not hide the content of the others.
    errors = [content["error"] for content in contents if "error" in content]
    for text in errors:
        click.echo(f"Error: {printable(text)}", err=True)
    if errors:
        raise click.exceptions.Exit(1)


def _described(
    path: Path, *, limit: int, sha256: str | None, check: bool, as_json: bool
) -> dict[str, Any]:
    """Return the content of a file as plain data, with an error if it is not a model.

    Without ``as_json``, it is shown as tables.
    """
    try:
        info, how = _inspected(path, sha256, check=check)
    except ui.ERRORS as error:
        return {"path": str(path), "error": ui.one_line(error)}

    if not as_json:
        show(info, limit, how)
    content = asdict(info)
    if how:
        content["check"] = how
    # The tables say what the file is; the error is for scripts, which would go on to load it.
    if info.kind in NEVER_INTACT:
        content["error"] = f"{path}: {info.kind}, not a model"
    return content


def _inspected(path: Path, sha256: str | None, *, check: bool) -> tuple[files.FileInfo, str]:
    """Return the content of a file, and how it was tested, if at all."""
    if not check:
        with ui.progress(f"reading {path.name}"):
            info = files.inspect(path, hashed=sha256 is not None)
        if sha256 not in {None, info.sha256}:
            raise other_file(str(path), str(sha256), info.sha256)
        return info, ""

    with ui.progress(f"verifying {path.name}", 1.0) as bar:
        file = file_in(path)
        parts = parts_of(file)
        # A digest of an index does not cover its shards, so it is computed only to be compared.
        results = [check_file(file, sha256, hashed=not parts, progress=bar)]
        results += map(check_file, parts)

    info = replace(files.inspect(path, hashed=False), sha256=results[0].sha256)
    return info, f"intact: {'; '.join(dict.fromkeys(result.how for result in results))}"


def show(info: files.FileInfo, limit: int, how: str = "") -> None:
    """Print the content of a file as tables.

    Args:
        info: The content.
        limit: Most rows of each table.
        how: How the file was tested, if it was.
    """
    size = decimal(info.nbytes)
    facts = {
        "file": info.path,
        "kind": info.kind,
        # Rich writes sizes below 1,000 in bytes already.
        "size": f"{size} ({info.nbytes:,} bytes)" if info.nbytes >= 1000 else size,
        "tensors": f"{len(info.tensors):,}" if info.tensors else "",
        "SHA-256": info.sha256,
        "check": how,
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
        ("--key", "tensors", "averages of"): _keys_of(info),
        ("tensor", "shape", "dtype", "size"): tensors,
        ("other entry", "value"): list(info.entries.items()),
    }
    ui.print_tables(tables, limit)


def _keys_of(info: files.FileInfo) -> list[tuple[object, ...]]:
    """Return a row for each key with tensors or averages.

    Keys in parentheses also hold other entries.
    """
    sizes = {tensor.name: tensor.nbytes for tensor in info.tensors}
    rows: list[tuple[object, ...]] = []
    for key, names in info.groups.items():
        paths = [f"{key}.{name}" if key else name for name in names]
        tensor_sizes = [sizes[path] for path in paths if path in sizes]
        owner = "modkit.EMA" if set(names) >= _EMA_STATE else recognise(dict.fromkeys(names))
        # A model inside DistributedDataParallel has the names that timm's averages have.
        owner = None if owner == "timm" else owner

        if tensor_sizes or owner:
            shown_key = key or "-"
            has_other_entries = len(tensor_sizes) < len(names)
            summary = f"{len(tensor_sizes):,}, {decimal(sum(tensor_sizes))}"
            rows.append(
                (f"({shown_key})" if has_other_entries else shown_key, summary, owner or "")
            )
    return rows
