"""The group of all commands."""

import importlib
from typing import Any, Final

import click


# To add a command, write `modkit/cli/NAME.py` with a click command of that name, and name it here.
NAMES: Final = ("average", "compat", "inspect")


class Commands(click.Group):
    """A group that imports the file of a command when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all commands, in the order of the help."""
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in NAMES:
            return None
        found: Any = getattr(importlib.import_module(f"modkit.cli.{cmd_name}"), cmd_name)
        assert isinstance(found, click.Command)
        return found


@click.version_option(package_name="modkit")
@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Tools around modkit, a facade over PyTorch modules and weight averaging."""
