"""``modkit inspect``: the content of a model file, without executing code from it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.filesize import decimal
from rich.table import Table

from modkit import files
from modkit.averaging.foreign_states import recognise
from modkit.cli import _tables as ui
from modkit.files.kinds import SAFETENSORS, SHARDED, parse_digest
from modkit.files.tensor_files import file_in


_EMA_STATE = {"version", "step", "averages", "schedules"}


@click.command(epilog=ui.EPILOG)
@click.argument("file", type=ui.INPUT)
@ui.json_option
@click.option("--limit", type=click.IntRange(0), default=100, help="Maximum rows per table [100].")
@click.option("--sha256", metavar="DIGEST", help="Fail unless the file has this digest.")
@click.option("--check", is_flag=True, help="Fail unless the file is intact.")
def inspect(file: Path, as_json: bool, limit: int, sha256: str | None, check: bool) -> None:
    """List the content of FILE, without executing code from it.

    FILE is a checkpoint of torch.save, a TorchScript or torch.export archive, a safetensors file, the
    index of a sharded checkpoint, or a directory that transformers wrote. The column --key lists the
    keys for `modkit average --key`. An empty, corrupt or unknown file is an error.

    \b
    Examples:
      modkit inspect model.pt
      modkit inspect model.pt --check --sha256 5f2c...
      modkit inspect model.safetensors --json
    """  # noqa: D301
    wanted = None if sha256 is None else parse_digest(sha256)
    with ui.progress("reading"):
        if check:
            files.verify(file, wanted)
        info = files.inspect(file)
    if wanted not in {None, info.sha256}:
        raise ValueError(f"{file} has the SHA-256 {info.sha256}, not {wanted}")
    tested = _tested(file, info, wanted) if check else ""
    if as_json:
        ui.print_json({**asdict(info), **({"check": tested} if check else {})})
    else:
        show(info, limit, tested)
    if info.kind == "unknown file":
        raise click.ClickException("this kind of file is not known")


def _tested(file: Path, info: files.FileInfo, sha256: str | None) -> str:
    """Return what ``files.verify`` has found out about a file that it accepts."""
    if sha256 is not None:
        return "intact: it has the expected SHA-256"
    shards = file_in(file).suffixes if info.kind == SHARDED else ()
    if info.kind == SAFETENSORS or ".safetensors" in shards:
        return "the header is intact; safetensors files have no checksums of their tensors"
    return "intact: all checksums match"


def show(info: files.FileInfo, limit: int, tested: str = "") -> None:
    """Print the tables."""
    out = ui.console()
    facts = {
        "file": info.path,
        "kind": info.kind,
        "size": f"{decimal(info.nbytes)} ({info.nbytes:,} bytes)",
        "tensors": f"{len(info.tensors):,}" if info.tensors else "",
        "SHA-256": info.sha256,
        "check": tested,
        "note": info.note,
    }
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, ui.cell(value))
    out.print(table)
    tensors = [(t.name, t.shape, t.dtype, decimal(t.nbytes)) for t in info.tensors]
    tables: dict[tuple[str, ...], Sequence[tuple[object, ...]]] = {
        ("--key", "tensors", "averages of"): _keys_of(info),
        ("tensor", "shape", "dtype", "size"): tensors,
        ("other entry", "value"): list(info.entries.items()),
    }
    for headings, rows in tables.items():
        if rows[:limit]:
            ui.print_table(headings, rows[:limit])
    if (longest := max(map(len, tables.values()))) > limit:
        out.print(f"--limit {longest} shows all rows")


def _keys_of(info: files.FileInfo) -> list[tuple[object, ...]]:
    """Return a row for each key with tensors or averages; keys in parentheses also hold other entries."""
    tensors = {each.name: each for each in info.tensors}
    rows: list[tuple[object, ...]] = []
    for key, names in info.groups.items():
        found = [t for name in names if (t := tensors.get(f"{key}.{name}" if key else name))]
        owner = "modkit.EMA" if set(names) >= _EMA_STATE else recognise(dict.fromkeys(names))
        # A model inside DistributedDataParallel has the names that timm's averages have.
        owner = None if owner == "timm" else owner
        if found or owner:
            text = (key or "-") if len(found) == len(names) else f"({key or '-'})"
            nbytes = decimal(sum(each.nbytes for each in found))
            rows.append((text, f"{len(found):,}, {nbytes}", owner or ""))
    return rows
