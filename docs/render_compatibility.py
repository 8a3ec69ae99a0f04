"""Write docs/compatibility.md from docs/compatibility.json, the last run of the tests on each release.

python docs/render_compatibility.py                  # render
python docs/render_compatibility.py --record FILE    # add the run of this Python and torch first

FILE is what `pytest --junitxml=FILE` has written; `nox -s "tests(torch='2.8.0')"` does both.
"""

import argparse
import json
import platform
import sys
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
FOUND = ROOT / "docs" / "compatibility.json"
COUNTS = ("passed", "skipped", "xfailed", "failed")

INTRODUCTION = """\
# Compatibility

<!-- Rendered from docs/compatibility.json by docs/render_compatibility.py. -->

modkit admits the releases of torch and Python that its tests ran on.

## Tests

The whole suite, once for each release; torch is the oracle each time. `skipped` counts tests that need a
package, a device or a feature that is not there; `xfailed` counts the rows of [the table of
differences](parity.md). `nox -s "tests(torch='2.8.0')"` runs the tests and writes its row."""


def numbers(release: str) -> tuple[int, ...]:
    """Return a release in an order that sorts."""
    return tuple(int(part) for part in release.split("."))


def table(runs: list[dict[str, Any]]) -> str:
    """Return the runs as a table in Markdown, sorted by torch and Python."""
    lines = [
        f"| torch | Python | {' | '.join(COUNTS)} | seconds | date |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for run in sorted(runs, key=lambda run: (numbers(run["torch"]), numbers(run["python"]))):
        counts = " | ".join(f"{run[name]:,}" for name in COUNTS)
        lines.append(
            f"| {run['torch']} | {run['python']} | {counts} | {run['seconds']:,} | {run['date']} |"
        )
    return "\n".join(lines)


def render() -> str:
    """Return the page."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    runs = table(found["tests"]) if found["tests"] else "No complete run is recorded yet."
    return f"{INTRODUCTION}\n\n{runs}\n"


def kind(case: ET.Element) -> str:
    """Return what became of a test."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def record(results: Path) -> int:
    """Put a run into the file, in place of the last one on this torch and Python; count failures."""
    tree = ET.parse(results).getroot()  # noqa: S314 - pytest wrote it
    counts = Counter(kind(case) for case in tree.iter("testcase"))
    run = {
        "torch": version("torch").split("+")[0],
        "python": platform.python_version(),
        **{name: counts[name] for name in COUNTS},
        "seconds": round(sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite"))),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {"tests": []}
    same = ("torch", "python")
    others = [one for one in found["tests"] if any(one[name] != run[name] for name in same)]
    found["tests"] = [*others, run]
    FOUND.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return counts["failed"]


def main() -> int:
    """Record a run if there is one, and write the page; return 1 if tests failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="the results of pytest --junitxml")
    results = parser.parse_args().record
    failed = record(results) if results else 0
    PAGE.write_text(render(), encoding="utf-8")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
