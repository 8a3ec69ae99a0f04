"""The group of all commands."""

import re
from typing import Any

import click

from modkit import __version__
from modkit.cli._tables import EPILOG
from modkit.cli.average import average
from modkit.cli.compat import compat
from modkit.cli.inspect import inspect
from modkit.errors import shown


class _Commands(click.Group):
    """A group of commands whose errors are one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Error: interrupted", err=True)
            raise click.exceptions.Exit(130) from None
        except (click.exceptions.Exit, click.Abort, click.ClickException, BrokenPipeError):
            raise
        except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
            # Some libraries raise indented paragraphs.
            text = re.sub(r"\s*\n\s+", " ", str(error).strip())
            text = shown(text) or type(error).__name__
            raise click.ClickException(text) from error


@click.version_option(__version__)
@click.group(
    cls=_Commands,
    commands=[average, compat, inspect],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
def commands() -> None:
    """Average checkpoints, look into model files, and compare modkit with PyTorch.

    \b
    Examples:
      modkit inspect model.pt
      modkit average run/1.pt run/2.pt -o soup.safetensors
      modkit compat my_package.models:Net --input 8,3,32,32
    """  # noqa: D301
