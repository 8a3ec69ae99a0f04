"""``modkit compat``: the differences between torch and modkit, in general or on one model."""

import json
from typing import Any

import click

from modkit.cli._tables import EPILOG, json_option, print_json, print_table, progress
from modkit.compat.model import Target, TargetError, compare
from modkit.compat.report import Report
from modkit.compat.run import areas, run


def parsed(_: click.Context, parameter: click.Parameter, value: str) -> Any:
    """Read JSON of the type that the default of an option has."""
    wanted = type(json.loads(str(parameter.default)))
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value!r} is not JSON: {error}") from None
    if not isinstance(found, wanted):
        raise click.BadParameter(f"{value!r} is not a {wanted.__name__}")
    return found


@click.command(epilog=EPILOG)
@click.argument("target", required=False)
@click.option("--area", "chosen", multiple=True, help="Run only the behaviors of this area.")
@click.option("--args", default="[]", callback=parsed, help="Arguments of TARGET: a JSON list.")
@click.option("--kwargs", default="{}", callback=parsed, help="Keyword arguments: a JSON object.")
@click.option(
    "--input", "inputs", multiple=True, help="A shape as 1,3,224,224, or module:function."
)
@click.option("--swap", multiple=True, metavar="PACKAGE", help="Use modkit in this package too.")
@json_option
def compat(
    target: str | None,
    chosen: tuple[str, ...],
    args: list[Any],
    kwargs: dict[str, Any],
    inputs: tuple[str, ...],
    swap: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare modkit with the installed torch; any unlisted difference is an error.

    Without TARGET, the shared behaviors run with both. TARGET is a model, package.module:Class or
    path/to/script.py:factory. It is built on torch, and on modkit by replacing torch.nn in its
    package by modkit.nn, and the two are compared.

    \b
    Examples:
      modkit compat
      modkit compat --area "forward hooks" --json
      modkit compat my_package.models:Net --kwargs '{"width": 64}' --input 8,3,32,32
      modkit compat train.py:make_model --input train.py:make_inputs
    """  # noqa: D301
    if target and chosen:
        raise click.UsageError("--area cannot be used with TARGET")
    if not target and (args or kwargs or inputs or swap):
        raise click.UsageError("--args, --kwargs, --input and --swap need TARGET")
    for area in chosen:
        if area not in areas():
            raise click.UsageError(f"{area!r} is not an area: {', '.join(areas())}")
    if target:
        try:
            with progress("comparing"):
                report = Report(*compare(Target(target, args, kwargs, inputs, swap)), by_area=False)
        except TargetError as error:
            raise click.UsageError(str(error)) from error
    else:
        with progress("running", 1.0) as bar:
            report = Report("shared behaviors", run(chosen, bar), by_area=True)
    if as_json:
        print_json(report.as_json())
    else:
        for title, headings, rows in report.tables():
            print_table(headings, rows, title)
    if report.failed:
        raise click.exceptions.Exit(1)
