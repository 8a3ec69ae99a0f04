"""What all commands have in common."""

import importlib.util

import click.testing
import pytest

from modkit import __main__ as entry
from modkit.cli._commands import NAMES, commands


def invoke(*arguments):
    """Run a command line and return what it printed, and with which status it ended."""
    return click.testing.CliRunner().invoke(commands, arguments)


def test_the_help_names_every_command():
    """The help of the group lists the commands, and each has a help of its own."""
    found = invoke("--help")

    assert found.exit_code == 0
    for name in NAMES:
        assert name in found.output
        assert invoke(name, "--help").exit_code == 0
    assert invoke("nonsense").exit_code == 2


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    """Without the extra, the command line says what it needs and how to get it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "click" else find(name)
    )
    with pytest.raises(SystemExit) as ended:
        entry.main()

    assert "needs click, " in ended.value.code
    assert "pip install modkit[cli]" in ended.value.code
