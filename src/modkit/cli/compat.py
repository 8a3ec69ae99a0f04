"""``modkit compat``: the differences between torch and modkit, in general or on one model."""

import json
from pathlib import Path
from typing import Any

import click

from modkit.cli import _tables as ui
from modkit.compat.model import Target, TargetError, compare, failed
from modkit.compat.run import Report, areas, run
from modkit.errors import printable
from modkit.files.atomic_write import atomic_write


def _parsed(_: click.Context, parameter: click.Parameter, value: str) -> Any:
    """Read JSON of the type that the default of an option has."""
    expected_type = type(json.loads(str(parameter.default)))
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value!r} is not JSON: {error}") from None
    if not isinstance(content, expected_type):
        raise click.BadParameter(f"{value!r} is not a {expected_type.__name__}")
    return content


@click.command(epilog=ui.EPILOG)
@click.argument("target", required=False)
@click.option("--area", "chosen", multiple=True, help="Run only the behaviors of this area.")
@click.option("--args", default="[]", callback=_parsed, help="Arguments of TARGET: a JSON list.")
@click.option("--kwargs", default="{}", callback=_parsed, help="Keyword arguments: a JSON object.")
@click.option("--input", "inputs", multiple=True, help="A shape as 8,3,32,32, or module:function.")
@click.option("--swap", multiple=True, metavar="PACKAGE", help="Use modkit in this package too.")
@click.option("--html", "page", type=ui.OUTPUT, help="Write a self-contained page with all tables.")
@ui.json_option
def compat(
    target: str | None, chosen: tuple[str, ...], page: Path | None, as_json: bool, **options: Any
) -> None:
    """Compare modkit with the installed torch; any unlisted difference is an error.

    Without TARGET, the shared behaviors run with both. TARGET is a model, package.module:Class or
    path/to/script.py:factory. It is built on torch, and on modkit by replacing torch.nn in its
    package by modkit.nn, and the two are compared. Without --input, one is made for the first
    layers, and shown. A model that cannot be called on either side is an error: nothing was
    compared.

    \b
    Examples:
      modkit compat
      modkit compat --area "forward hooks" --json
      modkit compat my_package.models:Net --kwargs '{"width": 64}' --input 8,3,32,32
      modkit compat train.py:make_model --input train.py:make_inputs --html report.html
    """  # noqa: D301
    if target and chosen:
        raise click.UsageError("--area cannot be used with TARGET")
    if not target and any(options.values()):
        raise click.UsageError("--args, --kwargs, --input and --swap need TARGET")
    unknown = [area for area in chosen if area not in areas()]
    if unknown:
        raise click.UsageError(f"{unknown[0]!r} is not an area: {', '.join(areas())}")
    if page and not page.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {page.parent}")

    if target:
        click.echo(f"building {printable(target)} on torch and on modkit, and comparing", err=True)
        try:
            with ui.progress("comparing"):
                report = Report(*compare(Target(target, **options)), by_area=False)
        except TargetError as error:
            raise click.UsageError(str(error)) from error
    else:
        with ui.progress("running", 1.0) as bar:
            report = Report("shared behaviors", run(chosen, bar), by_area=True)

    if page:
        with atomic_write(page) as file:
            file.write_text(report.as_html(), encoding="utf-8")
    if as_json:
        ui.print_json(report.as_json())
    else:
        for title, headings, rows in report.tables():
            if title != "Listed differences":
                ui.print_table(headings, rows, title)
    if failed(report.results):
        raise click.exceptions.Exit(1)
