"""``python -m benchmarks``: time modkit relative to torch, and compare the ratios with the budgets."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from benchmarks import (
    averages,
    files,
    growth as growing,
    report,
    rows as operations,
    scripts,
    workloads,
)
from benchmarks.measure import Found, measure, quiet


STORED = Path(__file__).parents[1] / "docs" / "_render" / "results" / "benchmarks.json"
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="WORD", help="Only rows whose name contains it.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Time for each row; five rounds are run in any case.",
)
@click.option(
    "--growth/--no-growth",
    default=None,
    help="Also time trees of 100 to 40,000 modules. On, unless --only is given.",
)
@click.option("--without-compile", is_flag=True, help="Leave torch.compile out: it takes minutes.")
@click.option(
    "--scripts",
    "checkouts",
    envvar="MODKIT_SCRIPTS",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Also time steps of public scripts, whose checkouts are in this folder at OWNER/NAME.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 1 if a budget is missed by more than noise, or modkit calls more functions in "
    "Python than in the stored run.",
)
@click.option("--json", "json_path", type=FILE, help="Write everything to this file as JSON.")
@click.option("--markdown", "markdown_path", type=FILE, help="Write the tables to this file.")
def main(
    only: tuple[str, ...],
    seconds: float,
    growth: bool | None,
    without_compile: bool,
    checkouts: Path | None,
    check: bool,
    json_path: Path | None,
    markdown_path: Path | None,
) -> None:
    """Measure the time of modkit relative to torch, and compare it with the budgets.

    The arms of a row run interleaved in this process, on one thread. Each round gives one ratio to
    torch; the tables show the median of the ratios and the middle half of them.
    """
    every = [
        *operations.OPERATIONS,
        *averages.ROWS,
        *files.ROWS,
        *workloads.rows(with_compile=not without_compile),
    ]
    every += scripts.rows(checkouts)
    rows = [row for row in every if not only or any(word in row.name for word in only)]
    if not rows:
        names = "\n  ".join(row.name for row in every)
        raise click.UsageError(f"no row contains {' or '.join(map(repr, only))}:\n  {names}")
    console = Console(stderr=True)
    found: list[Found] = []
    with quiet() as collect:
        for row in track(rows, "measuring", console=console, transient=True):
            console.print(row.name, highlight=False, markup=False)
            found += measure(row, seconds)
            collect()
        grown = (
            list(growing.measure_growth(growing.SIZES, growing.TENSORS))
            if growth or (growth is None and not only)
            else []
        )
    everything = report.report(found, grown)
    more = report.more_calls(everything, json.loads(STORED.read_text(encoding="utf-8")))
    text = report.markdown(everything) + "".join(f"\n{line}" for line in more)
    output = Console()
    output.print(Markdown(text)) if output.is_terminal else click.echo(text)
    for path, content in ((json_path, json.dumps(everything, indent=1)), (markdown_path, text)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.rstrip() + "\n", encoding="utf-8")
    if check and (more or any(row["verdict"] == "missed" for row in found)):
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
