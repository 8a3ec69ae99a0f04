"""pytest plugin of ``modkit compat --tests``: swaps imports, seeds each test, records outcomes.

The variable ``MODKIT_COMPAT`` holds its :class:`~modkit.compat.swapped_imports.Options`.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from modkit.compat.swapped_imports import VARIABLE, Options, SwappedImports


if TYPE_CHECKING:
    from collections.abc import Generator

# The worst outcome over setup, call, teardown and subtests is the outcome of a test.
_SEVERITY: Final = ("passed", "xpassed", "skipped", "xfailed", "failed", "error")
_TEXT: Final = 300  # characters of an exception's text that are compared
_TRACEBACK: Final = 6_000  # characters of a traceback that are kept, from its end


# Without the variable, the plugin records nothing: it may be imported outside of a run.
_options: Final = Options(**json.loads(os.environ.get(VARIABLE, '{"outcomes": ""}')))
_worst: dict[str, dict[str, str]] = {}
_interrupts: list[bool] = []


def _write(**line: object) -> None:
    """Append a line to the file of this process: workers of pytest-xdist write side by side."""
    if _options.outcomes:
        file = Path(_options.outcomes) / f"{os.getpid()}.jsonl"
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(line) + "\n")


if _options.packages or _options.paths:
    # In front of Python's own finders, which would import the modules as they are.
    sys.meta_path.insert(
        0,
        SwappedImports(
            _options.packages,
            [Path(path) for path in _options.paths],
            report=lambda name: _write(swapped=name),
        ),
    )


def neutral(text: str) -> str:
    """Return a text without addresses, temporary folders and the name of the library."""
    # Shorter numbers are not addresses, and a test may differ in them.
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    # The folder of tmp_path; workers of pytest-xdist have one each, named popen-gw0.
    text = re.sub(r"\S*pytest-of-\S+?/pytest-\d+(/popen-gw\d+)?", "TMP", text)
    return re.sub(r"\bmodkit\.(nn|jit|optim)\b", r"torch.\1", text)


def _seed() -> None:
    """Seed the generators of Python, torch and NumPy, the last only if the tests import it."""
    random.seed(0)
    torch.manual_seed(0)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def pytest_collectstart() -> None:
    """Seed before a file is collected: it may make its networks when it is imported."""
    _seed()


# Before pytest's own hook, which sets up the fixtures: they may draw random numbers.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before each test, so that no test depends on the ones before it."""
    _seed()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that a process has run before, which crashed after them."""
    before = {
        json.loads(text).get("test")
        for file in Path(_options.outcomes).glob("*.jsonl")
        for text in file.read_text(encoding="utf-8").splitlines()
        # A process that was killed may have left half a line.
        if _options.outcomes and text.endswith("}")
    }
    ran = [item for item in items if neutral(item.nodeid) in before]
    if ran:
        config.hook.pytest_deselected(items=ran)
        # In place, because pytest goes on with this list.
        items[:] = [item for item in items if item not in ran]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record how many tests there are, for the progress bar."""
    _write(collected=len(session.items))


def pytest_keyboard_interrupt() -> None:
    """Note that the tests did not reach their end: ``pytest.exit()`` may give any status."""
    _interrupts.append(True)


# Before the user's own hook, which may end the process.
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the end of the tests, which a process or a session that a test ends does not reach."""
    # A worker of pytest-xdist ends before the process that started it.
    if not (_interrupts or hasattr(session.config, "workerinput")):
        _write(finished=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the start of a test, so that a crash of the process names its test."""
    _write(test=neutral(nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the worst outcome over the phases and subtests of a test."""
    report = yield

    outcome: str = report.outcome
    # Pytest reports an expected failure as skipped, and an unexpected pass as passed.
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    # Outside of the call, a fixture has failed and not the test: an error in pytest's summary.
    elif outcome == "failed" and report.when != "call":
        outcome = "error"

    before = _worst.setdefault(item.nodeid, {"outcome": "passed"})
    if _SEVERITY.index(outcome) > _SEVERITY.index(before["outcome"]):
        line = {"outcome": outcome}
        if outcome in {"failed", "error"} and call.excinfo is not None:
            line["raised"] = call.excinfo.typename
            line["text"] = neutral(str(call.excinfo.value)).partition("\n")[0][:_TEXT]
            line["traceback"] = report.longreprtext[-_TRACEBACK:]
        _worst[item.nodeid] = line
    return report


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write the outcome of the test, in the process that ran it."""
    line = _worst.pop(nodeid, None)
    if line is not None:
        _write(test=neutral(nodeid), **line)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that cannot be collected as one test."""
    if report.failed:
        lines = report.longreprtext.strip().splitlines() or [""]
        _write(
            test=neutral(report.nodeid),
            outcome="uncollected",
            text=neutral(lines[-1])[:_TEXT],
            traceback=report.longreprtext[-_TRACEBACK:],
        )
