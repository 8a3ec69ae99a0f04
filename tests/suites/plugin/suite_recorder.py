"""Pytest plugin: seed every generator before each test, and write outcomes to ``SUITE_OUTCOMES``.

``SUITE_SAMPLE`` has the files of which one test in so many runs, chosen by the test's id.

One line of JSON when a test starts and one when it ends, so that a crash names its test.
"""

import json
import os
import random
import re
import resource
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch


OUTCOMES = Path(os.environ["SUITE_OUTCOMES"])
SAMPLE = json.loads(os.environ.get("SUITE_SAMPLE", "{}"))
SEVERITY = ("passed", "xpassed", "skipped", "xfailed", "failed", "error")
# A test that needs more memory fails alone.
resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
_found: dict[str, tuple[str, str]] = {}
_started: dict[str, float] = {}


def _name(nodeid: str) -> str:
    return re.sub(r"0x[0-9a-f]{6,}", "0x", nodeid).replace("modkit.nn", "torch.nn")


def _write(**line: object) -> None:
    with OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed all generators, so that a test does not depend on earlier ones."""
    _seed()


def pytest_collectstart(collector):
    """Seed all generators before a file is collected."""
    _seed()


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config, items):
    """Sample the tests of files that take too long."""
    kept = [i for i in items if not zlib.crc32(_name(i.nodeid).encode()) % _rate(i.nodeid)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _rate(nodeid: str) -> int:
    return next((rate for start, rate in SAMPLE.items() if nodeid.startswith(start)), 1)


def pytest_runtest_logstart(nodeid, location):
    """Record the start of a test."""
    _started[nodeid] = time.process_time()
    _write(test=_name(nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep the worst outcome over the phases and subtests of a test."""
    report = yield
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    elif outcome == "failed" and report.when != "call":
        outcome = "error"
    raised = call.excinfo.typename if outcome in {"failed", "error"} and call.excinfo else ""
    before = _found.get(item.nodeid, ("passed", ""))
    if SEVERITY.index(outcome) > SEVERITY.index(before[0]):
        _found[item.nodeid] = (outcome, raised)
    return report


def pytest_runtest_logfinish(nodeid, location):
    """Write the outcome of the test."""
    outcome, raised = _found.pop(nodeid, ("passed", ""))
    seconds = round(time.process_time() - _started.pop(nodeid), 1)
    _write(test=_name(nodeid), outcome=outcome, raised=raised, seconds=seconds)


def pytest_collectreport(report):
    """Count a file that cannot be collected as one test."""
    if report.failed:
        text = str(getattr(report.longrepr, "longrepr", report.longrepr)).strip()
        _write(test=_name(report.nodeid), outcome="uncollected", raised=text.rsplit("\n", 1)[-1])
