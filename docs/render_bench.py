"""The tables of docs/benchmarks.md, from docs/bench.json.

python docs/render_bench.py --measure   # measure first: half an hour, on an idle machine
"""

import subprocess
import sys
from typing import Any

from blocks import DOCS, ROOT, read, table


COLD = ", caches evicted"
# Operations below this ratio are not in the table.
SHOWN = 1.0
ARMS = ("modkit", "TorchScript frozen", "torch.compile", "limit")


def cell(value: float | str | None) -> str:
    """Return a ratio with two digits, or the reason why there is none."""
    return value or "" if isinstance(value, str) or value is None else f"{value:.2f}"


def rows(name: str) -> list[list[str]]:
    """Return one row per operation or model, the slowest first, with the cold-cache ratio as a column."""
    from benchmarks import report  # noqa: PLC0415 - the root is on the path by now

    found = report.ordered(read("bench")["rows"], name)
    cold = {row["name"].removesuffix(COLD): row for row in found if row["name"].endswith(COLD)}
    warm = [row for row in found if not row["name"].endswith(COLD)]
    if name == "operations":
        warm = [row for row in warm if row["ratio"] >= SHOWN]
    lines = []
    for row in warm:
        evicted = cold.get(row["name"])
        arms = [row["others"].get(arm) for arm in (ARMS if name == "inference" else ARMS[-1:])]
        lines.append(
            [
                f"`{row['name']}`" if name == "operations" else row["name"],
                report.amount(row["base"], row["unit"]),
                f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
                cell(evicted and evicted["ratio"]),
                cell(row["budget"]),
                row["verdict"],
                *map(cell, arms),
            ]
        )
    return lines


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    from benchmarks import report  # noqa: PLC0415

    found: dict[str, Any] = read("bench")
    shared = ["evicted", "budget", "verdict"]
    return {
        "operations": f"{report.heading(found)}\n\n"
        + table(["operation", "torch", "ratio", *shared, "limit"], rows("operations")),
        "inference": table(
            ["model", "torch", "`fast_inference`", *shared, *ARMS], rows("inference")
        ),
        "growth": report.growth(
            [
                row
                for row in found["growth"]
                if row["tree"] == "wide" or row["operation"].startswith("load")
            ]
        ),
    }


def measure() -> None:
    """Measure everything; a missed budget is shown, and does not stop the run."""
    command = [sys.executable, "-m", "benchmarks", "--json", str(DOCS / "bench.json")]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603 - our own command


if __name__ == "__main__":
    from render import write_pages

    if "--measure" in sys.argv[1:]:
        measure()
    write_pages()
