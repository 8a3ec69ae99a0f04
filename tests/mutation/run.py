"""Plant the bugs one by one in a copy of the project, and report which tests catch them.

python -m tests.mutation.run                  # all
python -m tests.mutation.run --only schedules # those whose mechanism or file has the word
"""

from __future__ import annotations

import argparse
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.mutation.planted import BUGS, Bug


ROOT = Path(__file__).resolve().parents[2]
# Exit codes of pytest if a test has failed, or could not be collected.
CAUGHT = (1, 2)
MOST_MEMORY = 8 << 30


def copied(folder: Path) -> Path:
    """Copy the project, so that bugs never get into the working tree."""
    names = ("src", "tests", "docs", "examples", "benchmarks")
    ignored = shutil.ignore_patterns("__pycache__", "_build")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in (*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.t*")):
        shutil.copy(file, folder)
    return folder


def run_tests(folder: Path, *arguments: str, limit: float = math.inf) -> tuple[int, list[str]]:
    """Run pytest on the copy; return its status, -9 after ``limit`` seconds, and the failed tests.

    In a forked process, which has torch and pytest already: importing them takes longer than most tests.
    """
    report = folder / "report.txt"
    child = os.fork()
    if not child:
        descriptor = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # A bug may allocate without bound.
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        os.chdir(folder)
        places = [str(folder / "src"), str(folder)]
        sys.path[:0] = places
        os.environ.update(PYTHONPATH=os.pathsep.join(places), OMP_NUM_THREADS="1")
        for name in [name for name in sys.modules if name.partition(".")[0] in {"modkit", "tests"}]:
            del sys.modules[name]
        status = 3
        try:
            status = int(pytest.main(["-q", "-rfE", "-p", "no:cacheprovider", *arguments]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    ends = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.02)
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(ended[1])
    text = report.read_text(encoding="utf-8", errors="replace")
    return status, re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.MULTILINE)


def caught_by(bug: Bug, folder: Path, *, quick: bool) -> str:
    """Return the first test that fails with a bug, or an empty text."""
    file = folder / "src" / "modkit" / bug.file
    intact = file.read_text(encoding="utf-8") if file.exists() else ""
    if intact.count(bug.old) != 1:
        # The code has moved: the bug needs another text, or is no more.
        return ""
    file.write_text(intact.replace(bug.old, bug.new), encoding="utf-8")
    try:
        for paths in (bug.tests.split(),) if quick else (bug.tests.split(), []):
            status, failed = run_tests(folder, "-x", *paths)
            if status in CAUGHT and failed:
                return failed[0]
    finally:
        file.write_text(intact, encoding="utf-8")
    return ""


def run(bugs: list[Bug], *, quick: bool) -> list[dict[str, str]]:
    """Plant each bug in turn; return the rows of the report."""
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = copied(Path(name))
        for bug in bugs:
            test = caught_by(bug, folder, quick=quick)
            rows.append({"file": bug.file, "mechanism": bug.mechanism, "caught by": test})
            sys.stdout.write(f"{bug.file}: {bug.mechanism}: {test or 'MISSED, or not there'}\n")
            sys.stdout.flush()
        # A test that also fails without a bug has not caught it.
        tests = {row["caught by"] for row in rows} - {""}
        _, failed = run_tests(folder, *sorted(tests)) if tests else (0, [])
        for row in rows:
            if row["caught by"] in failed:
                sys.stdout.write(f"{row['caught by']} fails without a bug\n")
                row["caught by"] = ""
    return rows


def main() -> int:
    """Run all bugs, or some; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="word in the mechanism or the file")
    parser.add_argument("--quick", action="store_true", help="run the named tests only")
    given = parser.parse_args()
    chosen = [bug for bug in BUGS if (given.only or "") in f"{bug.file}: {bug.mechanism}"]
    rows = run(chosen, quick=given.quick)
    caught = sum(bool(row["caught by"]) for row in rows)
    sys.stdout.write(f"{caught} of {len(rows)} planted bugs are caught\n")
    return int(caught < len(rows))


if __name__ == "__main__":
    sys.exit(main())
