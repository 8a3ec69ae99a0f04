"""The tables of docs/benchmarks.md, from docs/bench.json.

python docs/render_bench.py --measure   # measure first: half an hour, on an idle machine
"""

import subprocess
import sys
from typing import Any

from blocks import DOCS, ROOT, fill, read, table


COLD = ", caches evicted"
# Operations below this ratio are not in the table.
SHOWN = 1.0
DASH, SPACE = "\N{EN DASH}", "\N{NO-BREAK SPACE}"
ARMS = {
    "operations": (),
    "files": ("zlib", "safetensors"),
    "inference": ("modkit", "TorchScript frozen", "torch.compile", "limit"),
}


def cell(value: float | str | None) -> str:
    """Return a ratio with two digits, or the reason why there is none."""
    return value or "" if isinstance(value, str) or value is None else f"{value:.2f}"


def rows(name: str) -> list[list[str]]:
    """Return one row per operation or model, the slowest first, with the cold-cache ratio as a column."""
    from benchmarks import report

    found = report.ordered(read("bench")["rows"], name)
    cold = {row["name"].removesuffix(COLD): row for row in found if row["name"].endswith(COLD)}
    warm = [row for row in found if not row["name"].endswith(COLD)]
    if name == "operations":
        warm = [row for row in warm if row["ratio"] >= SHOWN]
    lines = []
    for row in warm:
        evicted = cold.get(row["name"])
        arms = [row["others"].get(arm) for arm in ARMS[name]]
        lines.append(
            [
                row["name"] if name == "inference" else f"`{row['name']}`",
                report.amount(row["base"], row["unit"]).replace(" ", SPACE),
                f"{row['ratio']:.2f}{SPACE}({row['low']:.2f}{DASH}{row['high']:.2f})",
                cell(evicted["ratio"] if evicted else None),
                cell(row["budget"]),
                row["verdict"],
                *map(cell, arms),
            ]
        )
    return lines


def growth(series: list[dict[str, Any]]) -> str:
    """Return the exponents of loading, and the range of the others, in a paragraph."""
    load = "load_state_dict()"
    parts = [
        f"`{load}` {row['tree']} {row['modkit_exponent']:.2f} (torch {row['torch_exponent']:.2f})"
        for row in series
        if row["operation"] == load
    ]
    modkit, torch = (
        sorted(row[name] for row in series if row["operation"] != load and row[name] is not None)
        for name in ("modkit_exponent", "torch_exponent")
    )
    largest = max(row["sizes"][-1] for row in series)
    return (
        f"Exponents up to {largest:,} modules: {', '.join(parts)}, other operations "
        f"{modkit[0]:.2f} to {modkit[-1]:.2f} (torch {torch[0]:.2f} to {torch[-1]:.2f})."
    )


def files() -> str:
    """Return the table of readers and writers of files; none is measured with evicted caches."""
    lines = [[*line[:3], *line[4:]] for line in rows("files")]
    return table(["operation", "torch", "ratio", "budget", "verdict", *ARMS["files"]], lines)


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    from benchmarks import report

    found: dict[str, Any] = read("bench")
    shared = ["evicted", "budget", "verdict"]
    return {
        "operations": f"{report.heading(found)}\n\n"
        + table(["operation", "torch", "ratio", *shared], rows("operations")),
        "files": files(),
        "inference": table(
            ["model", "torch", "`fast_inference`", *shared, *ARMS["inference"]], rows("inference")
        ),
        "growth": fill(growth(found["growth"])),
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
