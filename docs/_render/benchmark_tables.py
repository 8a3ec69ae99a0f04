"""The tables of docs/benchmarks.md, and with budgets and verdicts those of docs/benchmark_budgets.md.

`python docs/render.py --renew benchmarks` measures first: half an hour, on an idle machine.
"""

from typing import Any

from _render.markdown import fill, table
from _render.stored_results import read


COLD = ", caches evicted"
# Operations above this ratio are on the page for users, which also shows the figure of all kinds.
SLOWER = 1.05
DASH, SPACE = "\N{EN DASH}", "\N{NO-BREAK SPACE}"
# Columns of each table for what else was measured.
ARMS = {
    "operations": (),
    "files": ("zlib", "safetensors"),
    "inference": ("modkit", "TorchScript frozen", "torch.compile", "limit"),
}
HEADINGS = {
    "operations": ("operation", "torch", "modkit / torch"),
    "files": ("operation", "torch", "modkit / torch"),
    "inference": ("model", "torch", "`fast_inference` / torch"),
}
BUDGETS = """\
# Benchmark budgets

For contributors: every row of `nox -s bench`, with its budget. A change that misses a budget reports the figure and
what was tried. [Benchmarks](benchmarks.md) is the page for users, and explains how the rows are measured.

A budget is *met* if the median is within it, and *missed* if more than three quarters of the rounds are above it; in
between it is *within noise*. A row without a budget is missed above 1.05. *Evicted* is the ratio with cold caches.

{summary}

## Operations

{operations}

## Files

The budgets are for the ratio with the package zlib-ng; `zlib` is the ratio without it.

{files}

## Inference

{inference}"""


def cell(value: float | str | None) -> str:
    """Return a ratio with two digits, or the reason why there is none."""
    return value or "" if isinstance(value, str) or value is None else f"{value:.2f}"


def measured(name: str) -> list[dict[str, Any]]:
    """Return the rows of a table, the slowest first, each with its ratio for cold caches as `evicted`."""
    from benchmarks import report

    rows = report.ordered(read("benchmarks")["rows"], name)
    cold = {row["name"].removesuffix(COLD): row for row in rows if row["name"].endswith(COLD)}
    warm = [row for row in rows if not row["name"].endswith(COLD)]
    return [{**row, "evicted": cold.get(row["name"], {}).get("ratio")} for row in warm]


def first_cells(row: dict[str, Any]) -> list[str]:
    """Return the name of a row, the time of torch, and the ratio with its quartiles."""
    from benchmarks import report

    return [
        row["name"] if row["table"] == "inference" else f"`{row['name']}`",
        report.amount(row["base"], row["unit"]).replace(" ", SPACE),
        f"{row['ratio']:.2f}{SPACE}({row['low']:.2f}{DASH}{row['high']:.2f})",
    ]


def users_table(name: str, rows: list[dict[str, Any]]) -> str:
    """Return a table of ratios, without budgets."""
    # No file is measured with evicted caches.
    cold = ["evicted"] * (name != "files")
    lines = [
        [
            *first_cells(row),
            *(cell(row[column]) for column in cold),
            *(cell(row["others"].get(arm)) for arm in ARMS[name]),
        ]
        for row in rows
    ]
    return table([*HEADINGS[name], *cold, *ARMS[name]], lines)


def budgets_table(name: str) -> str:
    """Return a table of all rows, with budgets and verdicts."""
    lines = [
        [*first_cells(row), cell(row["evicted"]), cell(row["budget"]), row["verdict"]]
        for row in measured(name)
    ]
    return table([*HEADINGS[name], "evicted", "budget", "verdict"], lines)


def growth(series: list[dict[str, Any]]) -> str:
    """Return the exponents of loading and of averages, and the range of the others."""
    load = "load_state_dict()"
    trees = [row for row in series if row["tree"] != "tensors"]
    modkit, torch = (
        sorted(row[name] for row in trees if row["operation"] != load and row[name] is not None)
        for name in ("modkit_exponent", "torch_exponent")
    )
    loads = ", ".join(
        f"{row['tree']} {exponents(row)}" for row in trees if row["operation"] == load
    )
    text = (
        f"Exponents up to {trees[0]['sizes'][-1]:,} modules: `{load}` {loads}, other operations "
        f"{modkit[0]:.2f} to {modkit[-1]:.2f} (torch {torch[0]:.2f} to {torch[-1]:.2f})."
    )
    averages = [row for row in series if row["tree"] == "tensors"]
    if averages:
        parts = ", ".join(f"`{row['operation']}` {exponents(row)}" for row in averages)
        text += f" From {averages[0]['sizes'][0]} to {averages[0]['sizes'][-1]:,} tensors: {parts}."
    return text


def exponents(row: dict[str, Any]) -> str:
    """Return the exponent of modkit, and that of torch if it was measured."""
    torch = row["torch_exponent"]
    return f"{row['modkit_exponent']:.2f}" + ("" if torch is None else f" (torch {torch:.2f})")


def machine(results: dict[str, Any]) -> str:
    """Return the date of the run and its machine."""
    text = "{cores}-core {processor} CPU, {system}, Python {python}, torch {torch}"
    measured_on = f"Measured {results['date']} on a {text.format(**results['machine'])}."
    return fill(measured_on)


def blocks() -> dict[str, str]:
    """Return the blocks of the page for users."""
    results: dict[str, Any] = read("benchmarks")
    slower = [row for row in measured("operations") if row["ratio"] > SLOWER]
    return {
        "machine": machine(results),
        "operations": users_table("operations", slower),
        "files": users_table("files", measured("files")),
        "inference": users_table("inference", measured("inference")),
        "growth": fill(growth(results["growth"])),
    }


def page() -> str:
    """Return the page with budgets, for contributors."""
    from benchmarks import report

    names = ("operations", "files", "inference")
    tables = {name: budgets_table(name) for name in names}
    summary = report.heading(read("benchmarks"))
    return BUDGETS.format(summary=summary, **tables)
