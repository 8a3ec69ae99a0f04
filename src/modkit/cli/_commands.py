"""The group of all commands."""

from typing import Any

import click

from modkit import __version__
from modkit.cli import _tables as ui
from modkit.cli.average import average
from modkit.cli.compat import compat
from modkit.cli.convert import convert
from modkit.cli.diff import diff
from modkit.cli.inspect import inspect
from modkit.cli.migrate import migrate
from modkit.cli.verify import verify


class _DiffError(click.ClickException):
    """An error of ``diff``, whose status 1 says that two checkpoints differ."""

    exit_code = 2


class _Commands(click.Group):
    """A group of commands whose errors are one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:
            # A help that head does not read to its end is not an error.
            ui.discard_output()
            raise click.exceptions.Exit(0) from None
        except OSError as error:
            # A help that cannot be written, on a full disk for instance.
            ui.flush_or_discard_output()
            raise click.ClickException(ui.one_line(error)) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click would print "Aborted!" and exit with 1, which for diff means that files differ.
            # Shells report an interrupt as 128 + SIGINT.
            click.echo("Error: interrupted", err=True)
            raise click.exceptions.Exit(130) from None
        # Exit and Abort are RuntimeErrors, which the last clause would report as errors of a file.
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        # Before the last clause, since it is an OSError, too.
        except BrokenPipeError:
            ui.discard_output()
            raise click.exceptions.Exit(0) from None

        except ui.ERRORS as error:
            ui.flush_or_discard_output()
            is_diff = ctx.invoked_subcommand == "diff"
            failure = _DiffError if is_diff else click.ClickException
            raise failure(ui.one_line(error)) from error


@click.version_option(__version__)
@click.group(
    cls=_Commands,
    commands=[average, compat, convert, diff, inspect, migrate, verify],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=ui.EPILOG,
)
def commands() -> None:
    """Inspect, verify, compare, convert and average model files, and compare modkit with PyTorch.

    \b
    Examples:
      modkit inspect model.pt
      modkit verify run/
      modkit diff last.pt best.pt --key model --values
      modkit convert model.pt -o model.safetensors
      modkit average run/1.pt run/2.pt -o soup.safetensors
      modkit compat my_package.models:Net --input 8,3,32,32
    """  # noqa: D301
