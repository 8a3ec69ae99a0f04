"""``python -m modkit bench``: the time of modkit relative to torch, on the user's machine."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from modkit.cli import _bench_report as reports, _bench_rows
from modkit.cli._growth import SIZES, Series, measure_growth
from modkit.cli._measure import Result, Verdict, quiet
from modkit.cli._row_kinds import Row


STYLES: Final[dict[Verdict, str]] = {"met": "green", "within noise": "yellow", "missed": "red"}
# What the tables need where there is no terminal to ask for its width.
PLAIN_WIDTH: Final = 120


@contextmanager
def shown(table: Table, console: Console) -> Generator[None, None, None]:
    """Show a table: while it grows where there is a terminal, else when it is complete."""
    with Live(table, console=console) if console.is_terminal else nullcontext():
        yield
    if not console.is_terminal:
        console.print(table)


def show_rows(rows: Sequence[Row], seconds: float, console: Console) -> list[Result]:
    """Measure the rows, and print each as soon as it is known."""
    table = Table("operation", highlight=False)
    for heading in ("torch", "budget", "ratio", "middle half"):
        table.add_column(heading, justify="right")
    table.add_column("")
    results: list[Result] = []
    with quiet() as collect, shown(table, console):
        for row in rows:
            result = row.measure(seconds)
            results.append(result)
            style = STYLES[result.verdict]
            table.add_row(
                escape(result.name),
                reports.amount(result.base, result.unit),
                f"{result.budget:.2f}",
                f"{result.ratio:.3f}",
                f"{result.low:.3f}-{result.high:.3f}",
                f"[{style}]{result.verdict}",
            )
            collect()
    return results


def show_growth(sizes: tuple[int, ...], console: Console) -> list[Series]:
    """Time the operations on growing trees, and print the times and the exponents."""
    table = Table("operation", "tree", "", highlight=False)
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    table.add_column("exponent", justify="right")
    growth: list[Series] = []
    with quiet(), shown(table, console):
        for series in measure_growth(sizes):
            growth.append(series)
            ours, theirs = series.exponents
            both = (("modkit", series.modkit, ours), ("torch", series.torch, theirs))
            for name, times, exponent in both:
                cells = [reports.amount(time, "s") for time in times]
                cells += ["too long"] * (len(sizes) - len(cells))
                cells.append("" if exponent is None else f"{exponent:.2f}")
                first = name == "modkit"
                heading = (escape(series.operation), series.tree) if first else ("", "")
                table.add_row(*heading, name, *cells, end_section=not first)
    return growth


@click.command
@click.option("--only", multiple=True, metavar="WORD", help="Only rows whose name contains it.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Time for each row; five rounds are run in any case.",
)
@click.option("--growth", is_flag=True, help="Also time trees of 100 to 40,000 modules.")
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 1 where a budget is missed by more than the noise: where more than three "
    "quarters of the rounds are above it.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was found to this file as JSON.",
)
@click.option(
    "--markdown",
    "markdown_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was found to this file as Markdown.",
)
def bench(
    only: tuple[str, ...],
    seconds: float,
    growth: bool,
    check: bool,
    json_path: Path | None,
    markdown_path: Path | None,
) -> None:
    """Measure the time that modkit takes relative to torch, and hold it against the budgets.

    Both run in this process, in turns, on one thread. A round times one, then the other, and gives
    one ratio modkit / torch; the table shows the median of the ratios and the middle half of them,
    and the time that torch takes.
    """
    rows = [row for row in _bench_rows.ROWS if not only or any(word in row.name for word in only)]
    if not rows:
        names = "\n  ".join(row.name for row in _bench_rows.ROWS)
        raise click.UsageError(f"no row contains {' or '.join(map(repr, only))}:\n  {names}")
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(reports.description(reports.machine()), highlight=False)
    results = show_rows(rows, seconds, console)
    found = reports.report(results, show_growth(SIZES, console) if growth else [])
    console.print(reports.summary(found["rows"]), highlight=False)
    if json_path is not None:
        reports.write(json_path, reports.to_json(found))
    if markdown_path is not None:
        reports.write(markdown_path, reports.markdown(found))
    if check and any(result.verdict == "missed" for result in results):
        raise click.exceptions.Exit(1)
