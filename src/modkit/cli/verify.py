"""``modkit verify``: which files are intact, and SHA-256 sums for those that have no checksums."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from modkit.cli import _tables as ui
from modkit.errors import FileError
from modkit.files.atomic_write import atomic_write
from modkit.files.inspect import NEVER_INTACT, check_file
from modkit.files.kinds import CORRUPT_ZIP, kind_of
from modkit.files.tensor_files import INDEX, shards_of
from modkit.files.zip_archive import open_regular


# Files with these names must be models, whatever they contain; others are models by their content.
_MODEL_NAMES: Final = re.compile(
    r".*\.(pt|pth|pt2|ckpt|safetensors)|(pytorch|adapter|.*_pytorch)_model.*\.bin"
    rf"|.*\.(pt|pth|ckpt|safetensors|bin){re.escape(INDEX)}"
)
# A line of sha256sum. After a leading backslash, those in the name and line breaks are escaped.
_LINE: Final = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPES: Final = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r"}
_UNESCAPED: Final = {escape: char for char, escape in _ESCAPES.items()}


@click.command(epilog=ui.EPILOG)
@click.argument("paths", nargs=-1, metavar="PATH...", type=ui.INPUT)
@click.option(
    "--sha256sums", "sums", type=ui.INPUT, help="Compare with this file, as of sha256sum."
)
@click.option(
    "--write-sha256sums", "new_sums", type=ui.OUTPUT, help="Write this file for sha256sum -c."
)
@ui.json_option
def verify(
    paths: tuple[Path, ...], sums: Path | None, new_sums: Path | None, as_json: bool
) -> None:
    """Test whether each PATH is intact.

    PATH is a model file, an index with its shards, or a folder, which is searched recursively for
    model files. Checkpoints of torch.save, TorchScript and torch.export archives have checksums.
    Safetensors files have none: only their header and their sizes are tested, and their content is
    tested by --sha256sums alone. Names in such a file are relative to its folder. Without PATH, all
    files that it lists are tested.

    \b
    Examples:
      modkit verify last.pt model.safetensors
      modkit verify run/ --write-sha256sums run/SHA256SUMS
      modkit verify --sha256sums run/SHA256SUMS
    """  # noqa: D301
    if not paths and sums is None:
        raise click.UsageError("missing argument 'PATH...'")
    expected = {} if sums is None else _read_sums(sums)
    within = [path.resolve() for path in paths]
    # With PATH, a list may have other files, which are not tested.
    # A file that is itself a PATH is among the next line's, and not among its own parents.
    listed = [f for f in expected if not paths or not set(within).isdisjoint(f.parents)]
    files = {file.resolve(): file for path in paths for file in _model_files(path)}
    files |= {file: Path(os.path.relpath(file)) for file in listed if file not in files}
    if not files:
        raise FileNotFoundError(f"there are no model files in {', '.join(map(str, paths))}")
    if new_sums is not None and new_sums.resolve() in files:
        raise click.UsageError(f"--write-sha256sums would replace {new_sums}, which is tested")

    rows: list[dict[str, Any]] = []
    for number, (target, file) in enumerate(files.items(), 1):
        title = f"verifying {number}/{len(files)} {file.name}"
        row = _result(file, expected.get(target), title, hashed=new_sums is not None)
        rows.append(row)
        if not as_json:
            verdict = f"intact: {row['tested']}" if row["intact"] else f"failed: {row['error']}"
            # Most errors begin with the path, which begins this line already.
            ui.say(f"{file}: {verdict.replace(f': {file} is ', ': ', 1)}")
    if as_json:
        ui.print_json(rows)

    failed = sum(not row["intact"] for row in rows)
    if failed:
        unwritten = "" if new_sums is None else f"; {new_sums} was not written"
        raise click.ClickException(f"{failed} of {len(rows)} files failed{unwritten}")
    if new_sums is not None:
        _write_sums(new_sums, {Path(row["path"]): row["sha256"] for row in rows})


def _result(file: Path, digest: str | None, title: str, *, hashed: bool) -> dict[str, Any]:
    """Test one file; return plain data: how it was tested, or what is wrong."""
    try:
        with ui.progress(title, 1.0) as bar:
            # A list of sums may have other files than models.
            result = check_file(file, digest, hashed=hashed, any_kind=True, progress=bar)
    except ui.ERRORS as error:
        return {"path": str(file), "intact": False, "error": ui.one_line(error)}
    return {"path": str(file), "intact": True, "tested": result.how, "sha256": result.sha256}


def _model_files(path: Path) -> Iterator[Path]:
    """Yield the files to test: of an index also its shards, of a folder all models below it."""
    if not path.is_dir():
        yield path
        if path.name.endswith(INDEX):
            # The line of the index says why it cannot be read.
            try:
                yield from (shard for shard in shards_of(path) if shard.exists())
            except FileError:
                return
        return

    for folder, subfolders, names in os.walk(path, onerror=_raise):
        # Without the unfinished files of a process that is saving.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".modkit-"))
        for name in sorted(names):
            file = Path(folder, name)
            if _MODEL_NAMES.fullmatch(name) or _has_model(file):
                yield file


def _raise(error: OSError) -> None:
    """Refuse a folder that cannot be read, whose files would go unnoticed."""
    raise error


def _has_model(file: Path) -> bool:
    """Return True if a file is a model by its content, or a zip file that is cut off."""
    try:
        with open_regular(file) as descriptor:
            return kind_of(descriptor) not in NEVER_INTACT - {CORRUPT_ZIP}
    # Without the name of a model, a file that cannot be read is left out, such as a pipe.
    except (OSError, FileError):
        return False


def _read_sums(sums: Path) -> dict[Path, str]:
    """Return the SHA-256 of each file, by its absolute path."""
    digests: dict[Path, str] = {}
    # Not by splitlines(), which would also break a line at a carriage return in a name.
    lines = sums.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise FileError(f"{sums}: line {number} is not one that sha256sum writes")
        escaped, digest, name = match.groups()
        if escaped:
            name = re.sub(rb"\\[\\nr]", lambda escape: _UNESCAPED[escape[0]], name)
        digests[(sums.parent / os.fsdecode(name)).resolve()] = digest.decode().lower()
    return digests


def _write_sums(sums: Path, digests: Mapping[Path, str]) -> None:
    """Write what sha256sum would write in the folder of ``sums``."""
    folder = os.path.realpath(sums.parent)
    with atomic_write(sums) as unfinished, unfinished.open("wb") as lines:
        for file, digest in digests.items():
            # From a folder that a link leads to, ``..`` leads back to another one.
            name = os.path.relpath(Path(os.path.realpath(file.parent), file.name), folder)
            lines.write(_line(os.fsencode(name), digest))


def _line(name: bytes, digest: str) -> bytes:
    """Return a line of sha256sum, which begins with a backslash if the name has escapes."""
    escaped = re.sub(rb"[\\\n\r]", lambda char: _ESCAPES[char[0]], name)
    mark = b"\\" if escaped != name else b""
    return mark + digest.encode() + b"  " + escaped + b"\n"
