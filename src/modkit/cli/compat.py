"""``python -m modkit compat``: what differs between torch and modkit, in general or on one model."""

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from modkit.cli._tables import cell, console, one_line_errors
from modkit.compat.model import Target, TargetError, compare
from modkit.compat.report import Report
from modkit.compat.run import areas, run
from modkit.files.atomic_write import atomic_write


def as_json(_: click.Context, parameter: click.Parameter, value: str) -> Any:
    """Read JSON of the type that the default of an option has."""
    wanted = type(json.loads(str(parameter.default)))
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not JSON: {error}") from None
    if not isinstance(found, wanted):
        raise click.BadParameter(f"{value!r} is not a {wanted.__name__}")
    return found


@click.command
@click.argument("target", required=False)
@click.option("--area", "chosen", multiple=True, help="Run the behaviors of this area only.")
@click.option("--args", default="[]", callback=as_json, help="Arguments of TARGET: a JSON list.")
@click.option("--kwargs", default="{}", callback=as_json, help="Keyword arguments: a JSON object.")
@click.option(
    "--input", "inputs", multiple=True, help="A shape as 1,3,224,224, or module:function."
)
@click.option("--swap", multiple=True, metavar="PACKAGE", help="Put modkit into this one, too.")
@click.option("--json", "json_path", metavar="FILE", help="Write JSON; - is standard output.")
@click.option("--html", "html_path", metavar="FILE", help="Write a page.")
def compat(
    target: str | None,
    chosen: tuple[str, ...],
    args: list[Any],
    kwargs: dict[str, Any],
    inputs: tuple[str, ...],
    swap: tuple[str, ...],
    json_path: str | None,
    html_path: str | None,
) -> None:
    """Compare modkit with the installed torch.

    Without TARGET, run the shared behaviors with both. TARGET is a model, as package.module:Class or
    path/to/script.py:factory. It is built on torch, and on modkit by putting modkit.nn in the place of
    torch.nn in its package, and the two are compared. The exit status is 1 if anything differs that
    is not listed as a difference.
    """
    if target and chosen:
        raise click.UsageError("--area goes without TARGET")
    if not target and (args or kwargs or inputs or swap):
        raise click.UsageError("--args, --kwargs, --input and --swap go with TARGET")
    for area in chosen:
        if area not in areas():
            raise click.UsageError(f"{area!r} is none of the areas: {', '.join(areas())}")
    with one_line_errors():
        paths = (None if json_path == "-" else json_path, html_path)
        for path in filter(None, paths):
            if not Path(path).parent.is_dir():
                raise FileNotFoundError(f"there is no directory {Path(path).parent}")
        if target:
            try:
                report = Report(*compare(Target(target, args, kwargs, inputs, swap)), by_area=False)
            except TargetError as error:
                raise click.UsageError(str(error)) from error
        else:
            report = Report("shared behaviors", run(chosen), by_area=True)
        text = json.dumps(report.as_json(), indent=2) + "\n"
        for wanted, content in zip(paths, (text, report.as_html()), strict=True):
            if wanted is not None:
                with atomic_write(wanted) as file:
                    file.write_text(content, encoding="utf-8")
    if json_path == "-":
        click.echo(text, nl=False)
    else:
        show(report)
    if report.failed:
        raise click.exceptions.Exit(1)


def show(report: Report) -> None:
    """Print the tables, but not what is as listed."""
    for title, headings, rows in report.tables():
        if title != "Listed differences":
            table = Table(*headings, title=cell(title), title_justify="left")
            for row in rows:
                table.add_row(*map(cell, row))
            console().print(table)
