"""Run the suites, and write docs/_render/results/library_suites.json and the pages of the documentation.

python -m tests.suites                  # all of them
python -m tests.suites --only opacus    # some; the others keep their rows
"""

import argparse
import json
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.suites.libraries import LIBRARIES
from tests.suites.runs import ROOT, compare
from tests.suites.torch_tests import TORCH_TESTS


FOUND = ROOT / "docs" / "_render" / "results" / "library_suites.json"
# The tables of the report.
TABLES = {"suites": LIBRARIES, "torch's tests": TORCH_TESTS}


def main() -> int:
    """Run the chosen suites; return 1 if a result differs without a listed cause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of libraries")
    parser.add_argument("--jobs", type=int, default=2, help="how many suites at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "suites")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.only and FOUND.exists():
        found = json.loads(FOUND.read_text(encoding="utf-8"))
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            pool.submit(compare, library, options.folder.resolve()): (title, library.name)
            for title, libraries in TABLES.items()
            for library in libraries
            # Machines without a GPU could not run those of a device.
            if library.name in options.only or (not options.only and library.device == "cpu")
        }
        for done in as_completed(runs):
            title, name = runs[done]
            found.setdefault(title, {})[name] = done.result()
            write(found)
            say(name, done.result())
    rows = [row for title in TABLES for row in found.get(title, {}).values()]
    return any(not one["cause"] for row in rows for one in row["differing"])


def write(found: dict[str, Any]) -> None:
    """Write the report, with the rows in the order of the tables."""
    content: dict[str, Any] = {"torch": version("torch").partition("+")[0]}
    for title, libraries in TABLES.items():
        rows = found.get(title, {})
        content[title] = {one.name: rows[one.name] for one in libraries if one.name in rows}
    FOUND.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "render.py"))["write_pages"]()


def say(name: str, row: dict[str, Any]) -> None:
    """Print the counts of a library, and the differences without a listed cause."""
    sys.stderr.write(f"{name}: {row['sides']}, {row['seconds']} s\n")
    for each in [*row["differing"], *row["unsteady"]]:
        sys.stderr.write(f"  {each['test']}: {each['runs']} {each['cause']}\n")


if __name__ == "__main__":
    sys.exit(main())
