"""The command line, run in the process of the tests."""

import click.testing

from modkit.cli._commands import commands


def invoke(*arguments: object) -> click.testing.Result:
    """Run a command line, and return what it printed and with which status it ended."""
    return click.testing.CliRunner().invoke(commands, [*map(str, arguments)])
