"""What the commands ``average`` and ``inspect`` print: tables of text that comes from files."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import click
from rich.console import Console
from rich.markup import escape

from modkit.errors import printable


# The width of tables where the output is not a terminal.
PLAIN_WIDTH: Final = 160


def console() -> Console:
    """Return a console for tables, wide enough for them in a pipe."""
    found = Console(highlight=False)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found


def cell(text: object) -> str:
    """Return text from a file or a path as a table may show it: printable, and not read as markup."""
    return escape(printable(str(text)))


def size(count: int) -> str:
    """Write a number of bytes with a binary prefix."""
    for prefix, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {prefix}"
    return f"{count} B"


@contextmanager
def one_line_errors() -> Generator[None]:
    """Turn errors of files into one line and exit status 1."""
    try:
        yield
    except (click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise click.ClickException(printable(str(error)) or type(error).__name__) from error
