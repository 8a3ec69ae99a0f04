"""Helpers of the commands: tables of text from files, progress, JSON, and errors of one line."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from modkit.errors import printable, shown
from modkit.files.inspect import UNVERIFIED
from modkit.files.tensor_files import INDEX


class _Output(click.Path):
    """A file to write. Atomic writes need a name, so standard output is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(
                "standard output is not supported; give the name of a file, or ./-", param, ctx
            )
        return super().convert(value, param, ctx)


INPUT: Final = click.Path(exists=True, path_type=Path)
OUTPUT: Final = _Output(path_type=Path, dir_okay=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
# The exceptions of files, disks and missing libraries.
ERRORS: Final = (OSError, ValueError, RuntimeError, ImportError, MemoryError)


def epilog(success: str, failure: str, errors: int = 1) -> str:
    """Return the end of a command's help: its exit statuses, and how a shell completes it.

    Args:
        success: Meaning of the status 0.
        failure: Meaning of the status 1.
        errors: Status if a file cannot be read or written: 1, or 2 where 1 is the result of a
            comparison.

    Returns:
        Text in which click keeps line breaks.
    """
    wrong = "wrong command line" if errors == 1 else "an error of a file, or wrong command line"
    # Click would join the lines of a paragraph, unless it begins with a line of \b alone.
    return f"""\b
Exit status:
  0    {success}
  1    {failure}
  2    {wrong}
  130  interrupted with Ctrl-C

\b
Shell completion:
  eval "$(_MODKIT_COMPLETE=bash_source modkit)"   # or zsh_source
  _MODKIT_COMPLETE=fish_source modkit | source    # fish
"""


EPILOG: Final = epilog(
    "success; inspect and verify: each file is known and intact",
    "a file, the disk or a comparison failed; the error is one line",
)


def one_line(error: BaseException) -> str:
    """Return the text of an error for one line; some libraries raise indented paragraphs.

    Args:
        error: An exception, whose text may quote a file.

    Returns:
        Printable text of at most 2,000 characters; the name of the class if there is no text.
    """
    return shown(re.sub(r"\s*\n\s+", " ", str(error).strip())) or type(error).__name__


class _Console(Console):
    """A console that goes on when the reader of a pipe, such as head, has read enough."""

    def on_broken_pipe(self) -> None:
        discard_output()


def discard_output() -> None:
    """Discard what is left of the output; the exit status stays that of the command."""
    # Python flushes standard output when it ends, and would report a closed pipe there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_or_discard_output() -> None:
    """Write what is left of the output, or discard it where a full disk does not take it.

    Python would try again when it ends, report a second error, and exit with 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def console() -> Console:
    """Return a console for tables, with 160 columns in a pipe unless COLUMNS is set."""
    # In a pipe, rich takes 80 columns, and would fold most names of tensors; with COLUMNS=0, it
    # takes none, and prints nothing.
    width = shutil.get_terminal_size((160, 24)).columns
    # Rich highlights numbers, also those within the names of tensors.
    return _Console(highlight=False, width=width)


def cell(text: object) -> str:
    """Return text from a file or a path for a table: printable, and not interpreted as markup."""
    # A locale may be ASCII, and a pipe of Windows has a code page: the rest is escaped, too.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return escape(printable(str(text)).encode(encoding, "backslashreplace").decode(encoding))


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Print a table of text from files, with long cells folded.

    Args:
        headings: One text for each column.
        rows: One cell for each column; they may quote a file.
        title: Text above the table.
    """
    table = Table(title=title and cell(title), title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    console().print(table)


def print_tables(tables: Mapping[tuple[str, ...], Sequence[Sequence[object]]], limit: int) -> None:
    """Print several tables that may be long, and how all rows are shown.

    Args:
        tables: The rows of each table by its headings. A table without rows is left out.
        limit: The number of rows that are printed of each.
    """
    for headings, rows in tables.items():
        if rows[:limit]:
            print_table(headings, rows[:limit])
    longest = max(map(len, tables.values()))
    if longest > limit:
        console().print(f"--limit {longest} shows all rows")


def say(text: str) -> None:
    """Print a line that may quote a file."""
    # Rich would break the line at the width of the terminal, in a path for instance.
    console().print(cell(text), soft_wrap=True)


def warn_unverified(files: Iterable[Path]) -> None:
    """Say on standard error which files of torch have no checksums."""
    for file in files:
        click.echo(printable(f"{file}: {UNVERIFIED}"), err=True)


def print_json(content: Any) -> None:
    """Print JSON, in which control characters are escaped.

    Args:
        content: Plain data: dicts with strings as keys, lists, strings, numbers, bools and None.
    """
    try:
        # Not by rich, which would break long strings at the width of the terminal.
        click.echo(json.dumps(content, indent=2))
    except BrokenPipeError:
        discard_output()


@contextmanager
def progress(text: str, total: float | None = None) -> Generator[Callable[[float], None]]:
    """Show a bar in a block if standard error is a terminal.

    Args:
        text: What is done; it may quote a path.
        total: What is completed at the end; without it, the bar shows no percentage.

    Yields:
        A function that sets what is completed.
    """
    # Standard output may be piped to another command, or be JSON.
    errors = Console(stderr=True)
    percentage = [TaskProgressColumn()] if total else []
    bar = Progress(
        # Two long names of files would push the percentage out of a terminal of 80 columns.
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=44)),
        BarColumn(),
        *percentage,
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    with bar:
        task = bar.add_task(cell(text), total=total)
        yield lambda completed: bar.update(task, completed=completed)


def check_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse an output that is an input or cannot be written, before any work is done.

    Args:
        output: The file to write.
        inputs: Files, folders and indices that are read. All files of a folder are inputs, and all
            that lie beside an index.
        overwrite: Whether the output may exist.

    Raises:
        FileNotFoundError: If the folder of the output does not exist.
        PermissionError: If the folder, a device to write to, or a file to replace is not writable.
        FileExistsError: If the output is an input, exists without ``overwrite``, or has an index of
            shards beside it.
    """
    # A file is replaced where a link leads to, and that folder is written to.
    folder = Path(os.path.realpath(output)).parent if output.is_symlink() else output.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no directory {folder}")

    # A device is written to itself, and a write-protected file stays.
    is_device = output.exists() and not output.is_file()
    for written in [output] if is_device else [folder, output]:
        if written.exists() and not os.access(written, os.W_OK):
            raise PermissionError(f"{written} is not writable")
    # A second answer for a reader. False also for a name that is too long for a file.
    if os.path.exists(index := f"{output}{INDEX}"):  # noqa: PTH110
        raise FileExistsError(f"{index} exists: remove it and its shards, or choose another name")

    if output.exists():
        for path in inputs:
            # A folder may have links that lead nowhere.
            # The same file may have another path, by a link for instance.
            if any(file.exists() and output.samefile(file) for file in _files_of(path)):
                raise FileExistsError(f"{output} is an input: {path}")
        if not overwrite:
            raise FileExistsError(f"{output} exists; --overwrite replaces it")


def _files_of(path: Path) -> list[Path]:
    """Return an input, and all files that may be read with it."""
    folder = path.parent if path.name.endswith(INDEX) else path
    return [path, *(folder.iterdir() if folder.is_dir() else [])]
