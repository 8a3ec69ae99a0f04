"""Results of the benchmarks as plain data and as Markdown."""

import datetime as dt
import os
import platform
from collections import Counter
from typing import Any, Final

import torch

from benchmarks.measure import Found


# The columns of other arms in each table.
ARMS: Final[dict[str, tuple[str, ...]]] = {
    "operations": ("limit",),
    "files": ("zlib", "safetensors"),
    "inference": ("modkit", "TorchScript frozen", "torch.compile", "limit"),
    "scripts": ("modkit",),
}
HEADINGS: Final = {
    "operations": ("operation", "ratio"),
    "files": ("operation", "ratio"),
    "inference": ("model", "fast_inference"),
    "scripts": ("step of a script", "fast_inference"),
}


def report(rows: list[Found], growth: list[Found]) -> dict[str, Any]:
    """Add the date and the kind of machine."""
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count() or 1,
        "system": platform.system(),
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__.partition("+")[0],
    }
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    return {"date": date, "machine": machine, "rows": rows, "growth": growth}


def more_calls(found: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Say in which rows modkit calls more functions in Python than in the stored run.

    Counts are the same on any machine, but not with another release of Python or torch.
    """
    releases = ("python", "torch")
    if any(found["machine"][key] != stored["machine"][key] for key in releases):
        return []
    before = {row["name"]: row.get("calls", {}) for row in stored["rows"]}
    lines: list[str] = []
    for row in found["rows"]:
        new, old = row["calls"].get("modkit"), before.get(row["name"], {}).get("modkit")
        if new is not None and old is not None and new > old:
            lines.append(f"`{row['name']}`: {new:,} calls in Python, {old:,} in the stored run")
    return lines


def amount(value: float, unit: str = "s") -> str:
    """Write a time or a size with a prefix."""
    if unit == "B":
        return f"{value:,.0f} B"
    prefixes = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    prefix, scale = next((pair for pair in prefixes if value >= pair[1]), prefixes[-1])
    return f"{value / scale:.3g} {prefix}"


def heading(found: dict[str, Any]) -> str:
    """Count the verdicts, and name the date and the machine."""
    counts = Counter(row["verdict"] for row in found["rows"])
    machine = "{cores}-core {processor} CPU, {system}, Python {python}, torch {torch}"
    return (
        f"{counts['met']} of {len(found['rows'])} budgets met, {counts['within noise']} within noise, "
        f"{counts['missed']} missed ({found['date']}, {machine.format(**found['machine'])})."
    )


def table(headings: str, lines: list[list[str]]) -> str:
    """Render a table in Markdown; headings are separated by bars."""
    rows = [headings.split("|"), ["---"] * (headings.count("|") + 1), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def ordered(rows: list[Found], name: str) -> list[Found]:
    """Return the rows of a table, the largest ratio first."""
    return sorted((row for row in rows if row["table"] == name), key=lambda row: -row["ratio"])


def ratios(rows: list[Found], name: str) -> str:
    """Render a table of ratios, slowest first; an arm that is missing shows the reason."""
    lines = []
    for row in ordered(rows, name):
        others = [row["others"].get(arm, "") for arm in ARMS[name]]
        budget = "\N{EN DASH}" if row["budget"] is None else f"{row['budget']:.2f}"
        lines.append(
            [
                row["name"] if name in {"inference", "scripts"} else f"`{row['name']}`",
                amount(row["base"], row["unit"]),
                f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
                budget,
                row["verdict"],
                *(other if isinstance(other, str) else f"{other:.2f}" for other in others),
            ]
        )
    first, subject = HEADINGS[name]
    return table("|".join([first, "torch", subject, "budget", "", *ARMS[name]]), lines)


def growth(series: list[Found]) -> str:
    """Render the exponents."""
    lines = []
    for row in series:
        line = [f"`{row['operation']}`", row["tree"]]
        for name in ("modkit", "torch"):
            times, power = row[name], row[f"{name}_exponent"]
            line += [f"{row['sizes'][len(times) - 1]:,}", amount(times[-1])] if times else ["", ""]
            line.append("" if power is None else f"{power:.2f}")
        lines.append(line)
    return table("operation|tree|modules|modkit|exponent|up to|torch|exponent", lines)


def markdown(found: dict[str, Any]) -> str:
    """Render everything."""
    names = {row["table"] for row in found["rows"]}
    parts = [heading(found), *(ratios(found["rows"], name) for name in ARMS if name in names)]
    return "\n\n".join([*parts, *([growth(found["growth"])] if found["growth"] else [])]) + "\n"
