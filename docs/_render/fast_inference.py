"""The table of docs/fast_inference.md: steps per second of public scripts."""

from _render.benchmark_tables import first_cells, measured
from _render.markdown import fill, table
from _render.measured_code import note
from _render.stored_results import read


def blocks() -> dict[str, str]:
    """Return the block of the page."""
    rows = [
        [
            row["name"],
            f"{1 / row['base']:,.0f}",
            f"{1 / (row['base'] * row['ratio']):,.0f}",
            first_cells(row)[-1],
        ]
        for row in measured("scripts")
    ]
    if not rows:
        return {
            "scripts": "The last run of the benchmarks had no checkouts, so there are no figures."
        }
    headings = ["step of a script", "torch, per second", "inside the block, per second"]
    shown = table([*headings, "time inside the block / torch"], rows)
    measured_on = fill(f"Measured {read('benchmarks')['date']}. {note('benchmarks')}".strip())
    return {"scripts": f"{shown}\n\n{measured_on}"}
