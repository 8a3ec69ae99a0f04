"""The group of all commands."""

import importlib
from typing import Any, Final

import click

from modkit.errors import printable


# To add a command, write `modkit/cli/NAME.py` with a click command of that name, and name it here.
NAMES: Final = ("average", "compat", "inspect")
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


class Interrupted(click.ClickException):
    """Ctrl-C."""

    exit_code = 130


class Commands(click.Group):
    """A group that imports a command when it is called, and turns errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in NAMES:
            return None
        found: click.Command = getattr(importlib.import_module(f"modkit.cli.{cmd_name}"), cmd_name)
        found.epilog = EPILOG
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except (click.exceptions.Exit, click.Abort, click.ClickException, BrokenPipeError):
            raise
        except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
            text = printable(str(error)) or type(error).__name__
            raise click.ClickException(text) from error


@click.version_option(package_name="modkit")
@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
def commands() -> None:
    """Average checkpoints, look into model files, and compare modkit with PyTorch.

    \b
    Examples:
      modkit inspect model.pt
      modkit average run/1.pt run/2.pt -o soup.safetensors
      modkit compat my_package.models:Net --input 8,3,32,32
    """  # noqa: D301
