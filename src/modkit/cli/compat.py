"""``modkit compat``: the differences between torch and modkit, in general or on one model."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from modkit.cli import _tables as ui
from modkit.compat.suite import Kind, Suite, SuiteError, SuiteReport, compare_suite, project_of
from modkit.errors import printable


if TYPE_CHECKING:
    from modkit.compat.run import Report


class _NothingComparedError(click.ClickException):
    """A suite that could not be run. Exit status 1 says that tests differ."""

    exit_code = 2


@click.command(epilog=ui.EPILOG)
@click.argument("arguments", nargs=-1, metavar="[TARGET | -- PYTEST_ARGUMENT...]")
@click.option("--area", "chosen", multiple=True, help="Run only the behaviors of this area.")
@click.option("--input", "inputs", multiple=True, help="A shape as 8,3,32,32, or module:function.")
@click.option("--swap", multiple=True, metavar="PACKAGE", help="Use modkit in this package too.")
@click.option(
    "--tests",
    multiple=True,
    metavar="PATH",
    help="Run this file, folder or test of a pytest suite on torch and on modkit.",
)
@click.option("-n", "processes", type=click.IntRange(0), default=0, help="Processes for --tests.")
@click.option(
    "--keep-going", is_flag=True, help="Go on after a crash or a file that fails to load."
)
@ui.json_option
def compat(
    arguments: tuple[str, ...],
    chosen: tuple[str, ...],
    tests: tuple[str, ...],
    processes: int,
    keep_going: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare modkit with the installed torch.

    Any unlisted difference is an error. Without TARGET, the shared behaviors run with both. TARGET
    is a model, package.module:Class or path/to/script.py:factory, which is called without
    arguments. It is built on torch, and on modkit by replacing torch.nn in its package by
    modkit.nn, and the two are compared. Without --input, one is made for the first layers, and
    shown. A model that cannot be called on either side is an error: nothing was compared.

    With --tests, a pytest suite runs twice, as it is and with modkit in place of torch.nn in the
    modules of its project and in the packages of --swap; no file is changed. Outcomes and
    exceptions are compared test by test, and what differs is repeated. What follows -- is for
    pytest.

    \b
    Examples:
      modkit compat
      modkit compat --area "forward hooks" --json
      modkit compat my_package:Net --input 8,3,32,32
      modkit compat train.py:make_model --input train.py:make_inputs
      modkit compat --tests tests/ -n 4 -- -m "not slow"
    """  # noqa: D301
    if tests:
        if chosen or any(value for name, value in options.items() if name != "swap"):
            raise click.UsageError("--tests takes only --swap, -n, --keep-going and --json")
        _compare_tests(
            tests,
            arguments,
            swap=options["swap"],
            processes=processes,
            keep_going=keep_going,
            as_json=as_json,
        )
        return
    if processes or keep_going:
        raise click.UsageError("-n and --keep-going need --tests")
    if len(arguments) > 1:
        raise click.UsageError(f"one TARGET is compared at a time, got {len(arguments)}")

    if arguments:
        if chosen:
            raise click.UsageError("--area cannot be used with TARGET")
        report = _compare_model(arguments[0], **options)
    else:
        if any(options.values()):
            raise click.UsageError("--input and --swap need TARGET")
        report = _compare_behaviors(chosen)

    if as_json:
        ui.print_json(report.as_json())
    else:
        for title, headings, rows in report.tables():
            # They are in docs/differences.md with their reasons. JSON has them, too.
            if title != "Listed differences":
                ui.print_table(headings, rows, title)
    if report.failed():
        raise click.exceptions.Exit(1)


def _compare_model(path: str, **options: Any) -> "Report":
    """Compare a model of the user on torch and on modkit."""
    from modkit.compat.model import Target, TargetError, compare
    from modkit.compat.run import Report

    # Standard output is for the result alone, which may be JSON.
    click.echo(f"building {printable(path)} on torch and on modkit, and comparing", err=True)
    target = Target(path, **options)
    try:
        with ui.progress("comparing"):
            title, results = compare(
                target, progress=lambda check: click.echo(f"  {check}", err=True)
            )
    except TargetError as error:
        # A wrong target is an error of the command line: status 1 would mean that modkit differs.
        raise click.UsageError(str(error)) from error
    return Report(title, results, by_area=False)


def _compare_behaviors(chosen: tuple[str, ...]) -> "Report":
    """Compare the shared behaviors of some areas, or of all."""
    from modkit.compat.behaviours import areas
    from modkit.compat.run import Report, run

    if unknown := [area for area in chosen if area not in areas()]:
        raise click.UsageError(f"{unknown[0]!r} is not an area: {', '.join(areas())}")
    with ui.progress("running", 1.0) as bar:
        return Report("shared behaviors", run(chosen, bar), by_area=True)


def _compare_tests(
    tests: tuple[str, ...],
    arguments: tuple[str, ...],
    *,
    swap: tuple[str, ...],
    processes: int,
    keep_going: bool,
    as_json: bool,
) -> None:
    """Compare a suite on torch and on modkit, and print what differs."""
    # A test may be given by its id, as tests/test_net.py::test_forward.
    files = [Path(test.partition("::")[0]) for test in tests]
    for file in files:
        if not file.exists():
            raise click.UsageError(f"--tests: there is no {file}")

    suite = Suite(
        tests=tests,
        paths=list(dict.fromkeys(map(project_of, files))),
        packages=swap,
        arguments=arguments,
        processes=processes,
        keep_going=keep_going,
    )
    folders = ", ".join(printable(str(path)) for path in suite.paths)
    click.echo(f"running the tests on torch, then with modkit in {folders}", err=True)
    # A canceled job is terminated, which would leave the processes of the tests running.
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with ui.progress("running", 1.0) as bar:
            report = compare_suite(suite, bar)
    except SuiteError as error:
        raise _NothingComparedError(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, previous)

    if as_json:
        ui.print_json(_suite_as_json(report))
    else:
        _print_suite(report)
    if report.number("unlisted"):
        raise click.exceptions.Exit(1)


def _suite_as_json(report: SuiteReport) -> dict[str, Any]:
    """Return a comparison as plain data; outcomes are texts, the first run first."""
    results = [
        {
            **result._asdict(),
            "torch": list(map(str, result.torch)),
            "modkit": list(map(str, result.modkit)),
        }
        for result in report.differing
    ]
    counts = {kind: report.number(kind) for kind in get_args(Kind)}
    return {**report._asdict(), "tests": counts, "differing": results}


def _print_suite(report: SuiteReport) -> None:
    """Print the counts and the tests that differ."""
    outcomes = sorted({outcome for counts in report.counts.values() for outcome in counts})
    rows = [
        (side, *(counts.get(outcome, 0) for outcome in outcomes))
        for side, counts in report.counts.items()
    ]
    ui.print_table(("side", *outcomes), rows, f"{len(report.swapped)} modules used modkit")

    titles = {
        "unlisted": "Differing",
        "listed": "Listed differences",
        "unsteady": "Unsteady: the outcome changes when the test is repeated",
    }
    for kind, title in titles.items():
        differing = [
            (result.test, result.torch[0], result.modkit[0], result.reason)
            for result in report.differing
            if result.kind == kind
        ]
        if differing:
            ui.print_table(("test", "torch", "modkit", "reason"), differing, title)

    ui.say(
        f"{report.number('equal')} equal, {report.number('unlisted')} differing, "
        f"{report.number('listed')} listed differences, {report.number('unsteady')} unsteady, "
        f"in {report.seconds:.0f} s"
    )
