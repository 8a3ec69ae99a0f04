"""The section on write faults: what modkit's writers leave behind after each fault.

python docs/render_faults.py --run    # run every fault first: minutes, and root for all of them

Writers whose libraries are missing keep their previous figures.
"""

import argparse
import importlib
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from blocks import ROOT, read, table, write


ROUNDS = {"random": 50, "other": 5, "saves": 200}
# The rows of the table.
KINDS = (
    ("killed", "interrupted", "leftovers"),
    ("two_threads", "two_processes", "same_pid"),
    ("full_disk", "size_limit", "full_device"),
    ("read_only_folder", "read_only_system", "missing_folder", "folder_as_target"),
    ("long_name", "odd_name", "undecodable_name"),
    ("link", "dangling_link", "link_loop", "mode_and_owner"),
    ("fifo", "open_pipe", "null_device"),
)
NEEDS = {"lightning": ("lightning",), "transformers": ("transformers", "accelerate")}
TEXT = """\
# Test evidence

What the tests themselves were tested against: real faults while files are written, and bugs planted in the code.

## Faults while writing

Processes killed by `SIGKILL`, full and read-only file systems, real devices and PID namespaces, for each of
{writers}. A trial *held* if the target was a complete version, the next save left nothing beside it, and the error
had `errno` and the path.

{rows}

{intact:,} of {trials:,} trials held ({date}; {versions}). {hits} of the {kills:,} kills interrupted a save."""


def section() -> str:
    """Return the section in Markdown."""
    found = read("faults")
    cells = {
        name: [one for one in row["cells"].values() if "skipped" not in one]
        for name, row in found["faults"].items()
    }
    every = [one for some in cells.values() for one in some]
    killed = cells["killed"]
    rows = []
    for names in KINDS:
        shown = "; ".join(found["faults"][name]["title"] for name in names)
        found_here = counts([one for name in names for one in cells[name]])
        rows.append([shown, *(f"{count:,}" for count in found_here)])
    trials, intact = counts(every)
    return TEXT.format(
        writers=", ".join(found["writers"].values()),
        rows=table(["fault", "trials", "held"], rows, numbers=True),
        intact=intact,
        trials=trials,
        date=found["date"],
        versions=", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        hits=sum(one["notes"].get("left a temporary file", 0) for one in killed if "notes" in one),
        kills=sum(one["trials"] for one in killed),
    )


def counts(cells: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of trials, and of those that held."""
    return sum(one["trials"] for one in cells), sum(one["intact"] for one in cells)


def campaign() -> dict[str, Any]:
    """Run every fault with every installed writer; return the results."""
    faults = importlib.import_module("tests.unit.files.faults")
    runs = importlib.import_module("tests.unit.files.fault_runs")
    writers = importlib.import_module("tests.unit.files.writers")
    before = read("faults")
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


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from render import write_pages

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="run every fault first")
    if parser.parse_args().run:
        write("faults", campaign())
    write_pages()
