"""What the benchmark found, as JSON and as Markdown."""

import datetime as dt
import json
import os
import platform
from pathlib import Path
from typing import Literal, TypedDict

import torch

from modkit.cli._growth import Series
from modkit.cli._measure import Result, Verdict
from modkit.files.atomic_write import atomic_write


class Machine(TypedDict):
    """The kind of machine that was measured on."""

    processor: str
    cores: int
    system: str
    python: str
    torch: str


class RowReport(TypedDict):
    """One row: ratios are modkit / torch, and ``base`` is what torch needs."""

    name: str
    budget: float
    ratio: float
    low: float
    high: float
    verdict: Verdict
    base: float
    unit: Literal["s", "B"]
    rounds: int


class GrowthReport(TypedDict):
    """The times of one operation on trees of one kind, in seconds, and what exponents fit them."""

    operation: str
    tree: str
    sizes: list[int]
    modkit: list[float]
    torch: list[float]
    modkit_exponent: float
    torch_exponent: float | None


class Report(TypedDict):
    """All that one run has found."""

    date: str
    machine: Machine
    rows: list[RowReport]
    growth: list[GrowthReport]


def machine() -> Machine:
    """Describe this machine without naming it."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count() or 1,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def row_report(result: Result) -> RowReport:
    """Turn a row into plain data."""
    return {
        "name": result.name,
        "budget": result.budget,
        "ratio": round(result.ratio, 4),
        "low": round(result.low, 4),
        "high": round(result.high, 4),
        "verdict": result.verdict,
        "base": result.base,
        "unit": result.unit,
        "rounds": result.rounds,
    }


def growth_report(series: Series) -> GrowthReport:
    """Turn the times on growing trees into plain data."""
    ours, theirs = series.exponents
    return {
        "operation": series.operation,
        "tree": series.tree,
        "sizes": series.sizes,
        "modkit": series.modkit,
        "torch": series.torch,
        "modkit_exponent": round(ours, 3),
        "torch_exponent": None if theirs is None else round(theirs, 3),
    }


def report(results: list[Result], growth: list[Series]) -> Report:
    """Put together what was found, with the date and the kind of machine."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": machine(),
        "rows": [row_report(result) for result in results],
        "growth": [growth_report(series) for series in growth],
    }


def amount(value: float, unit: Literal["s", "B"]) -> str:
    """Write a time or a size with a prefix that suits it."""
    if unit == "B":
        return f"{value:,.0f} B"
    for prefix, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value / 1e-9:.3g} ns"


def summary(rows: list[RowReport]) -> str:
    """Count the verdicts."""
    counts = {"met": 0, "within noise": 0, "missed": 0}
    for row in rows:
        counts[row["verdict"]] += 1
    others = [f"{counts[verdict]} {verdict}" for verdict in ("within noise", "missed")]
    return f"{counts['met']} of {len(rows)} budgets met, {', '.join(others)}"


def description(found: Machine) -> str:
    """Describe the machine in a few words."""
    version = found["torch"].partition("+")[0]
    python = found["python"].rpartition(".")[0]
    return (
        f"{found['cores']}-core {found['processor']} CPU, {found['system']}, "
        f"Python {python}, torch {version}"
    )


def rows_markdown(rows: list[RowReport]) -> str:
    """Render the table of the ratios."""
    lines = ["| operation | torch | ratio | middle half | budget | |", "|---|---|---|---|---|---|"]
    for row in rows:
        name, base = f"`{row['name']}`", amount(row["base"], row["unit"])
        spread = f"{row['low']:.2f} to {row['high']:.2f}"
        figures = f"{row['ratio']:.2f} | {spread} | {row['budget']:.2f} | {row['verdict']}"
        lines.append(f"| {name} | {base} | {figures} |")
    return "\n".join(lines)


def growth_markdown(growth: list[GrowthReport]) -> str:
    """Render the table of the exponents."""
    heading = ("operation", "tree", "modules", "modkit", "exponent", "torch", "exponent", "up to")
    lines = [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading)]
    for row in growth:
        sizes, ours, theirs = row["sizes"], row["modkit"], row["torch"]
        exponent = row["torch_exponent"]
        cells = [
            f"`{row['operation']}`",
            row["tree"],
            f"{sizes[-1]:,}",
            amount(ours[-1], "s"),
            f"{row['modkit_exponent']:.2f}",
            amount(theirs[-1], "s") if theirs else "",
            "" if exponent is None else f"{exponent:.2f}",
            f"{sizes[len(theirs) - 1]:,}" if theirs else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(found: Report) -> str:
    """Render all that was found."""
    parts = [f"{found['date']}, {description(found['machine'])}: {summary(found['rows'])}."]
    if found["rows"]:
        parts.append(rows_markdown(found["rows"]))
    if found["growth"]:
        parts.append(growth_markdown(found["growth"]))
    return "\n\n".join(parts) + "\n"


def to_json(found: Report) -> str:
    """Write all that was found as JSON."""
    return json.dumps(found, indent=2) + "\n"


def write(path: Path, text: str) -> None:
    """Replace a file at once, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")
