"""The section on supported versions: the last run of the tests on each release.

python docs/render_compatibility.py --record FILE            # add the run of this Python and torch
python docs/render_compatibility.py --record FILE --again F  # with the files that ran again
python docs/render_compatibility.py --device XLA FILE        # add the run of tests/xla

FILE is what `pytest --junitxml=FILE` has written; `nox -s "tests(torch='2.8.0')"` does both. F is
the same for test files that failed in FILE and ran again, complete, after a fix. `nox -s xla` adds
the run on that device.
"""

import argparse
import platform
import sys
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from blocks import read, release, table, write


COUNTS = ("passed", "skipped", "xfailed", "failed")
NOT_RUN = {
    "XLA": "not run; `nox -s xla`",
    "CUDA": "not run; `pytest -m gpu`",
    "XPU": "not run",
    "MTIA": "not run",
}
TEXT = """\
# Compatibility

modkit supports the releases of torch and Python that its tests ran on. This page shows what was run, and what
differed: the tests on each release, the test suites of third-party libraries, `modkit compat`, and random
operations. [Differences from torch](parity.md) lists what differs on purpose.

## Versions

The complete test suite on each release. Torch is the oracle each time: a behavior test must pass on torch and on
modkit. `skipped` counts tests that need a missing package, device or feature, `xfailed` the rows of the table of
differences. `again` counts the test files that failed, and ran a second time after a fix; the other columns have their
second outcome. `nox -s "tests(torch='2.8.0')"` runs the tests and writes its row.

{}

## Devices

modkit has no code for a device except two workarounds for XLA; it calls torch. This is what was run:

{}

`nox -s xla` runs `tests/xla` on the CPU client of torch_xla, which has memory of its own, records each step as a graph
and counts compilations and tensors that the host reads. The tests compare values with the CPU, and require both counts
to be 0 in updates of averages and in swaps, up to step 1,000 of every schedule. Exceptions and limits on XLA:

- `precision="stochastic"` of 16-bit models reads its tensors on the host, because torch_xla has neither random
  generators nor `Tensor.view(dtype)`.
- torch_xla cannot read a file to the device (`map_location="xla"`). Read it to the CPU; loading moves the tensors.
- Where hooks or overrides take part in loading, torch's methods copy the tensors. Of a state dict on the device they
  share the memory, which training then frees: pass a state dict of the CPU.
- torch_xla has no gradients of batch normalization in evaluation mode, and its running variance is biased.
"""


def rows() -> list[list[object]]:
    """Return the runs, sorted by torch and Python."""
    runs: list[dict[str, Any]] = read("compatibility")["tests"]
    runs.sort(key=lambda run: (release(run["torch"]), release(run["python"])))
    return [
        [run["torch"], run["python"], *(f"{run[n]:,}" for n in COUNTS), run["again"], run["date"]]
        for run in runs
    ]


def section() -> str:
    """Return the section in Markdown."""
    found = rows()
    shown = table(["torch", "Python", *COUNTS, "again", "date"], found)
    shown = shown if found else "No complete run is recorded yet."
    return TEXT.format(shown, table(["device", "torch", "Python", *COUNTS, "date"], device_rows()))


def device_rows() -> list[list[object]]:
    """Return the runs on devices, and the devices that the tests did not run on."""
    runs: list[dict[str, Any]] = read("compatibility").get("devices", [])
    empty = [""] * (len(COUNTS) + 2)
    shown: list[list[object]] = [["CPU", "the releases above", *empty]]
    for run in sorted(runs, key=lambda one: str(one["device"])):
        counts = [f"{run[name]:,}" for name in COUNTS]
        shown.append([run["device"], run["torch"], run["python"], *counts, run["date"]])
    known = {row[0] for row in shown}
    for name, note in NOT_RUN.items():
        if name not in known:
            shown.append([name, note, *empty])
    return shown


def kind(case: ET.Element) -> str:
    """Return the outcome of a test."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def record(results: Path, again: list[Path], device: str | None = None) -> int:
    """Store a run in place of the last one on this torch and Python; return the number of failures.

    With ``device`` it takes the place of the last one on that device.
    """
    tree = ET.parse(results).getroot()  # noqa: S314 - pytest wrote it
    cases = [*tree.iter("testcase")]
    repeated: set[str | None] = set()
    for file in again:
        second = [*ET.parse(file).getroot().iter("testcase")]  # noqa: S314
        files = {case.get("classname") for case in second}
        cases = [case for case in cases if case.get("classname") not in files] + second
        repeated |= files
    counts = Counter(map(kind, cases))
    run = {
        "torch": version("torch").split("+")[0],
        "python": platform.python_version(),
        **{name: counts[name] for name in COUNTS},
        "again": len(repeated),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite"))),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    kind_of_run, same = "tests", ["torch", "python"]
    if device is not None:
        run = {"device": device, **run}
        del run["again"]
        kind_of_run, same = "devices", ["device"]
    stored = read("compatibility")
    others = stored.get(kind_of_run, [])
    others = [one for one in others if any(one[name] != run[name] for name in same)]
    write("compatibility", {**stored, kind_of_run: [*others, run]})
    return counts["failed"]


def main() -> int:
    """Record a run if one is given, and write the pages; return 1 if tests failed."""
    from render import write_pages

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="the results of pytest --junitxml")
    parser.add_argument("--again", type=Path, nargs="*", default=[], help="of files that ran again")
    parser.add_argument("--device", nargs=2, metavar=("NAME", "FILE"), help="a run on a device")
    given = parser.parse_args()
    failed = record(given.record, given.again) if given.record else 0
    if given.device:
        failed += record(Path(given.device[1]), [], given.device[0])
    write_pages()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
