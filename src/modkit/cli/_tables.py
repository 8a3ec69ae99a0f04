"""Helpers of the commands: tables of text from files, progress bars, JSON, and errors of one line."""

import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from modkit.errors import printable, shown


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
        success: The meaning of the status 0.
        failure: The meaning of the status 1.
        errors: The status if a file cannot be read or written; 2 where 1 is the result of a comparison.
    """
    wrong = "wrong command line" if errors == 1 else "an error of a file, or wrong command line"
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
    "success: each file is known and intact",
    "a file, the disk or a comparison failed; the error is one line",
)


def one_line(error: BaseException) -> str:
    """Return the text of an error for one line; some libraries raise indented paragraphs."""
    return shown(re.sub(r"\s*\n\s+", " ", str(error).strip())) or type(error).__name__


class _Console(Console):
    """A console that goes on when the reader of a pipe, such as head, has read enough."""

    def on_broken_pipe(self) -> None:
        discard_output()


def discard_output() -> None:
    """Discard what is still written to a closed pipe; the exit status stays that of the command."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Return a console for tables, with 160 columns in a pipe unless COLUMNS is set."""
    found = _Console(highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = 160
    return found


def cell(text: object) -> str:
    """Return text from a file or a path for a table: printable, and not interpreted as markup."""
    return escape(printable(str(text)))


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Print a table of text from files, with long cells folded."""
    table = Table(title=title and cell(title), title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    console().print(table)


def print_tables(tables: Mapping[tuple[str, ...], Sequence[Sequence[object]]], limit: int) -> None:
    """Print the first rows of several tables by their headings, and how all rows are shown."""
    for headings, rows in tables.items():
        if rows[:limit]:
            print_table(headings, rows[:limit])
    longest = max(map(len, tables.values()))
    if longest > limit:
        console().print(f"--limit {longest} shows all rows")


def say(text: str) -> None:
    """Print a line that may quote a file."""
    console().print(cell(text), soft_wrap=True)


def print_json(found: Any) -> None:
    """Print JSON, in which control characters are escaped."""
    try:
        click.echo(json.dumps(found, indent=2))
    except BrokenPipeError:
        discard_output()


@contextmanager
def progress(text: str, total: float | None = None) -> Generator[Callable[[float], None]]:
    """Show a bar if standard error is a terminal; yield a function that sets what is completed."""
    errors = Console(stderr=True)
    percent = [TaskProgressColumn()] if total else []
    columns = TextColumn("{task.description}"), BarColumn(), *percent, TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(cell(text), total=total)
        yield lambda completed: bar.update(task, completed=completed)


def check_output(output: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse an output that is an input or cannot be written, before any work is done."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {output.parent}")
    special = output.exists() and not output.is_file()
    if not os.access(output if special else output.parent, os.W_OK):
        raise PermissionError(f"{output if special else output.parent} is not writable")
    for path in inputs if output.exists() else ():
        folder = path.parent if path.name.endswith(".index.json") else path
        if any(map(output.samefile, [path, *(folder.iterdir() if folder.is_dir() else [])])):
            raise FileExistsError(f"{output} is an input: {path}")
    if output.exists() and not overwrite:
        raise FileExistsError(f"{output} exists; --overwrite replaces it")
