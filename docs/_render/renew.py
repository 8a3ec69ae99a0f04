"""Run again what the results of this folder were measured with, and store the new ones.

Each function is a command of docs/render.py. Sessions of nox that write results themselves, such as
`nox -s suites`, do not need it.
"""

import importlib
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from _render.stored_results import ROOT, file_of, read, release, today, write
from _render.tested_with import COUNTS


def benchmarks() -> None:
    """Measure everything, half an hour on an idle machine; a missed budget does not stop the run."""
    command = [sys.executable, "-m", "benchmarks", "--json", str(file_of("benchmarks"))]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603 - our own command


def peers() -> None:
    """Time the averages of all libraries that are installed: ten minutes on an idle machine."""
    store_times("times")


def gpu_peers() -> None:
    """Time them on a GPU: two minutes."""
    store_times("gpu_times", "--device", "cuda", "--seconds", "2")


def store_times(kind: str, *options: str) -> None:
    """Time averages with these options, and store them as one kind of times."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "peers.json"
        command = [sys.executable, "-m", "benchmarks.averaging_peers", "--json", str(report)]
        subprocess.run([*command, *options], check=True, cwd=ROOT)  # noqa: S603 - our own command
        times = json.loads(report.read_text(encoding="utf-8"))
    results = read("averaging_libraries")
    write("averaging_libraries", {**results, kind: {**times, "date": today()}})


def modkit_compat() -> None:
    """Run `modkit compat` with this torch, and on the models whose libraries are installed."""
    runner = importlib.import_module("modkit.compat.run")
    models = importlib.import_module("tests.integration.compat.models").MODELS
    results = read("modkit_compat")
    report = runner.Report("behaviors", runner.run(), by_area=True).as_json()
    torch = report["versions"]["torch"].split("+")[0]
    run = {**report["versions"], "torch": torch, "date": today(), "areas": report["areas"]}

    for name, target in models.items():
        library = name.split()[0]
        if importlib.util.find_spec(library) is not None:
            title, checks = importlib.import_module("modkit.compat.model").compare(target)
            differ = sum(check.kind == "unlisted" for check in checks)
            errors = sum(check.kind == "not compared" for check in checks)
            results.setdefault("models", {})[name] = {
                "date": today(),
                "torch": torch,
                "library": version(library),
                "modules": title.partition(": ")[2].rpartition(": ")[2].partition("; ")[0],
                "counts": [len(checks) - differ - errors, errors, differ],
            }
    behaviors = {**results.get("behaviors", {}), torch: run}
    write("modkit_compat", {**results, "behaviors": behaviors})


def outcome(case: ET.Element) -> str:
    """Return the outcome of a test."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def test_file_of(case: ET.Element) -> str | None:
    """Return the test file of a case; one that could not be imported is named in place of a test."""
    return case.get("classname") or case.get("name")


def store_test_run(report: Path, again: list[Path], device: str | None = None) -> int:
    """Store a run of the tests in place of the last one on this torch and Python.

    Args:
        report: What `pytest --junitxml` has written.
        again: Reports of test files that failed, and ran a second time, complete, after a fix.
        device: The device of the run; it then replaces the last one on that device.

    Returns:
        The number of tests that failed.
    """
    tree = ET.parse(report).getroot()  # noqa: S314 - pytest wrote it
    cases = [*tree.iter("testcase")]
    repeated: set[str | None] = set()
    for file in again:
        second = [*ET.parse(file).getroot().iter("testcase")]  # noqa: S314
        files = set(map(test_file_of, second))
        cases = [case for case in cases if test_file_of(case) not in files] + second
        repeated |= files

    counts = Counter(map(outcome, cases))
    run: dict[str, Any] = {
        "torch": version("torch").split("+")[0],
        "python": platform.python_version(),
        **{name: counts[name] for name in COUNTS},
        "again": len(repeated),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite"))),
        "date": today(),
    }
    kind, key = "tests", ["torch", "python"]
    if device is not None:
        run = {"device": device, **run}
        del run["again"]
        kind, key = "devices", ["device"]

    stored = read("test_runs")
    others = [old for old in stored.get(kind, []) if any(old[name] != run[name] for name in key)]
    write("test_runs", {**stored, kind: sorted([*others, run], key=order)})
    return counts["failed"]


def order(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return the sort key of a run: its device, torch and Python."""
    return (run.get("device", ""), release(run["torch"]), release(run["python"]))


COMMANDS = {
    "benchmarks": benchmarks,
    "peers": peers,
    "gpu_peers": gpu_peers,
    "modkit_compat": modkit_compat,
}
