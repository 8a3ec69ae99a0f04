"""Write docs/faults.md, the table of faults in docs/files.md: what modkit's writers leave after each.

python docs/render_faults.py          # from docs/faults.json, as it was run last
python docs/render_faults.py --run    # run every fault first: minutes, and root for all of them

The writers whose libraries are missing keep the figures that they had.
"""

import argparse
import importlib
import json
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
FOUND = ROOT / "docs" / "faults.json"
NOTICE = "<!-- from docs/faults.json, by docs/render_faults.py -->"
ROUNDS = {"random": 50, "other": 5, "saves": 200}
NEEDS = {"lightning": ("lightning",), "transformers": ("transformers", "accelerate")}


def cell(found: dict[str, Any]) -> str:
    """Return the outcome of a fault for one writer."""
    return "n/a" if "skipped" in found else f"{found['intact']} of {found['trials']}"


def table(found: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    titles, rows = found["writers"], found["faults"]
    lines = [f"| fault | {' | '.join(titles.values())} |", f"|---|{'---|' * len(titles)}"]
    lines += [
        f"| {row['title']} | {' | '.join(cell(row['cells'][name]) for name in titles)} |"
        for row in rows.values()
    ]
    return "\n".join(lines)


def summary(found: dict[str, Any]) -> str:
    """Say how many trials there were, when, and with which versions."""
    cells = [one for row in found["faults"].values() for one in row["cells"].values()]
    ran = [one for one in cells if "skipped" not in one]
    killed = found["faults"]["killed"]["cells"].values()
    hits = sum(one["notes"].get("left a temporary file", 0) for one in killed if "notes" in one)
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    trials, intact = (sum(one[name] for one in ran) for name in ("trials", "intact"))
    return (
        f"{intact:,} of {trials:,} held ({found['date']}; {versions}).\n"
        f"{hits} of the {sum(one['trials'] for one in killed):,} kills hit the middle of a save."
    )


def render() -> str:
    """Return the page."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    return f"{NOTICE}\n\n{table(found)}\n\n{summary(found)}\n"


def campaign() -> dict[str, Any]:
    """Run every fault with every writer that is here; return what goes into the file."""
    faults = importlib.import_module("tests.unit.files.faults")
    runs = importlib.import_module("tests.unit.files.fault_runs")
    writers = importlib.import_module("tests.unit.files.writers")
    before = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {"faults": {}}
    rows: dict[str, Any] = {
        one.name: {"title": one.title, "cells": {}} for one in faults.FAULTS.values()
    }
    for name in writers.WRITERS:
        if all(map(writers.installed, NEEDS.get(name, ()))):
            started = time.perf_counter()
            fresh = runs.run([name], **ROUNDS)
            sys.stderr.write(f"{name}: {time.perf_counter() - started:.0f} s\n")
        else:
            fresh = {row: {name: before["faults"][row]["cells"][name]} for row in rows}
        for row, cells in fresh.items():
            rows[row]["cells"][name] = cells[name]
            if lost := cells[name].get("lost"):
                sys.stderr.write(f"{row}, {name}:\n{lost}\n")
    packages = ["torch", "safetensors", *(p for some in NEEDS.values() for p in some[:1])]
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {name: version(name) for name in packages if writers.installed(name)},
        "rounds": ROUNDS,
        "writers": {name: writer.title for name, writer in writers.WRITERS.items()},
        "faults": rows,
    }


def main() -> None:
    """Run the faults if asked to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="run every fault first")
    if parser.parse_args().run:
        content = json.dumps(campaign(), indent=1, ensure_ascii=False)
        FOUND.write_text(f"{content}\n", encoding="utf-8")
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
