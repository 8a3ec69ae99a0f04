"""Running a suite on one side, and comparing the sides test by test."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.suites.libraries import Library
from tests.suites.trees import SIDES, unpack


ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("plugin")
REPEATS = 3
UNSTEADY = ("unsteady on torch", "alike in three further runs")


class Outcome(NamedTuple):
    """Outcome of a test, and the class of its exception."""

    outcome: str
    raised: str = ""

    def __str__(self) -> str:
        return f"{self.outcome} ({self.raised})" if self.raised else self.outcome


Outcomes = dict[str, Outcome]


def read(file: Path) -> Outcomes:
    """Return the recorded outcomes; a test that started and did not end is "cut off"."""
    found: Outcomes = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        line = json.loads(text)
        found[line["test"]] = Outcome(line.get("outcome", "cut off"), line.get("raised", ""))
    return found


def run(library: Library, tree: Path, tests: Sequence[str] = ()) -> Outcomes:
    """Run the suite, or some of its tests, in a new process."""
    outcomes = tree.parent / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    path = os.pathsep.join(map(str, (tree / library.root, tree, PLUGIN, ROOT / "src")))
    environment = {
        **os.environ,
        **library.environment,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": path,
        "SUITE_OUTCOMES": str(outcomes),
        "SUITE_SAMPLE": json.dumps(library.sample),
    }
    options = [
        *("-c", str(PLUGIN / "pytest.ini"), "--rootdir", str(tree), "--confcutdir", str(tree)),
        *("-p", "suite_recorder", "-p", "no:cacheprovider", "-p", "no:randomly"),
        *("-q", "--tb=short", "--continue-on-collection-errors", "--timeout=300"),
        "--hypothesis-seed=0",
        *(f"--deselect={test}" for test in library.left_out if "::" in test),
        *(f"--ignore={test}" for test in library.left_out if "::" not in test),
    ]
    command = [sys.executable, "-m", "pytest", *options, *(tests or library.tests)]
    with (tree.parent / "log.txt").open("w") as log:
        process = subprocess.Popen(
            *(command,),
            cwd=tree,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(library.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return read(outcomes)


def differing(sides: dict[str, Outcomes]) -> list[str]:
    """Return the tests whose outcomes differ between the sides."""
    tests = {test: None for outcomes in sides.values() for test in outcomes}
    missing = Outcome("not run")
    return [t for t in tests if len({each.get(t, missing) for each in sides.values()}) > 1]


def compare(library: Library, folder: Path) -> dict[str, Any]:
    """Run a library's suite on every side, rerun differing tests, and return the row of the report."""
    trees = {side: unpack(library, side, folder) for side in SIDES}
    started = time.perf_counter()
    sides = {side: run(library, trees[side]) for side in SIDES}
    seconds = time.perf_counter() - started
    doubtful = differing(sides)
    runs: dict[str, dict[str, list[str]]] = {
        test: {s: [str(sides[s].get(test, "not run"))] for s in SIDES} for test in doubtful
    }
    for _ in range(REPEATS if doubtful else 0):
        for side in SIDES:
            again = run(library, trees[side], again_of(doubtful))
            for test in doubtful:
                runs[test][side].append(str(again.get(test, "not run")))
    told = [
        {"test": test, "runs": runs[test], "cause": cause(library, test, runs[test])}
        for test in runs
    ]
    row = {
        "version": library.version,
        "seconds": round(seconds),
        "sides": {side: counts(each.values()) for side, each in sides.items()},
        "differing": [each for each in told if each["cause"] not in UNSTEADY],
        "unsteady": [each for each in told if each["cause"] in UNSTEADY],
        "left out": library.left_out,
        "sample": library.sample,
    }
    (folder / library.name / "row.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
    return row


def again_of(tests: Iterable[str]) -> list[str]:
    """Return the arguments that select the tests; those with addresses in their ids, by file."""
    return list(dict.fromkeys(t.split("::")[0] if "0x" in t else t for t in tests))


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return the number of tests by outcome."""
    found: dict[str, int] = {}
    for each in outcomes:
        found[each.outcome] = found.get(each.outcome, 0) + 1
    return dict(sorted(found.items()))


def cause(library: Library, test: str, runs: dict[str, list[str]]) -> str:
    """Return the cause of a different outcome; empty if unknown."""
    if len(set(runs["torch"])) > 1 and all(
        set(each) <= set(runs["torch"]) for each in runs.values()
    ):
        return UNSTEADY[0]
    if all(set(each[1:]) == set(runs["torch"]) for each in runs.values()):
        return UNSTEADY[1]
    return next((why for start, why in library.causes.items() if test.startswith(start)), "")
