"""Helpers of the commands: tables of text from files, progress bars, and JSON."""

import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from modkit.errors import printable


INPUT: Final = click.Path(exists=True, path_type=Path)
OUTPUT: Final = click.Path(path_type=Path, dir_okay=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
EPILOG: Final = """\b
Exit status:
  0    success
  1    a file, the disk or a comparison failed; the error is one line
  2    wrong command line
  130  interrupted with Ctrl-C

\b
Shell completion (bash; for others replace bash by zsh or fish):
  eval "$(_MODKIT_COMPLETE=bash_source modkit)"
"""


def console() -> Console:
    """Return a console for tables, with 160 columns in a pipe unless COLUMNS is set."""
    found = Console(highlight=False)
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


def print_json(found: Any) -> None:
    """Print JSON, in which control characters are escaped."""
    click.echo(json.dumps(found, indent=2))


@contextmanager
def progress(text: str, total: float | None = None) -> Generator[Callable[[float], None]]:
    """Show a bar if standard error is a terminal; yield a function that sets what is completed."""
    errors = Console(stderr=True)
    columns = TextColumn(text), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda completed: bar.update(task, completed=completed)
