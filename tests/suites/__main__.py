"""Run the suites and write the report.

python -m tests.suites                  # all of them
python -m tests.suites --only opacus    # some; the others keep their rows
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.suites.libraries import LIBRARIES
from tests.suites.runs import ROOT, compare


FOUND = ROOT / "docs" / "suites.json"


def main() -> int:
    """Run what was asked for; fail if a difference has no cause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of libraries")
    parser.add_argument("--jobs", type=int, default=2, help="how many libraries at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "suites")
    options = parser.parse_args()
    chosen = [one for one in LIBRARIES if not options.only or one.name in options.only]
    rows = (
        json.loads(FOUND.read_text(encoding="utf-8"))["libraries"]
        if FOUND.exists() and options.only
        else {}
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(compare, one, options.folder): one.name for one in chosen}
        for done in as_completed(runs):
            name = runs[done]
            rows[name] = done.result()
            say(name, rows[name])
            content = {
                "date": datetime.now(timezone.utc).date().isoformat(),
                "torch": version("torch").partition("+")[0],
                "libraries": {one.name: rows[one.name] for one in LIBRARIES if one.name in rows},
            }
            FOUND.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return any(not each["cause"] for name in runs.values() for each in rows[name]["differing"])


def say(name: str, row: dict[str, Any]) -> None:
    """Print the counts of a library, and what differs without a cause."""
    sys.stderr.write(f"{name}: {row['sides']}, {row['seconds']} s\n")
    for each in row["differing"]:
        if not each["cause"]:
            sys.stderr.write(f"  {each['test']}: {each['runs']}\n")


if __name__ == "__main__":
    sys.exit(main())
