"""pytest plugin of ``modkit compat --tests``: swaps imports, seeds each test, records outcomes.

The variable ``MODKIT_COMPAT`` holds its :class:`~modkit.compat.swapped_imports.Options`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from modkit.compat.outcomes import seed
from modkit.compat.swapped_imports import VARIABLE, Options, SwappedImports


if TYPE_CHECKING:
    from collections.abc import Generator

# The worst outcome over setup, call, teardown and subtests is the outcome of a test.
_SEVERITY: Final = ("passed", "xpassed", "skipped", "xfailed", "failed", "error", "cut off")
_TEXT: Final = 300  # characters of an exception's text that are compared
_TRACEBACK: Final = 6_000  # characters of a traceback that are kept, from its end


# Without the variable, the plugin records nothing: it may be imported outside of a run.
_options: Final = Options(**json.loads(os.environ.get(VARIABLE, '{"outcomes": ""}')))
_worst: dict[str, dict[str, str]] = {}
_ids: dict[str, str] = {}
_interrupts: list[bool] = []


def _write(**line: object) -> None:
    """Append a line to the file of this process: workers of pytest-xdist write side by side."""
    if _options.outcomes:
        file = Path(_options.outcomes) / f"{os.getpid()}.jsonl"
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(line) + "\n")


if _options.packages or _options.paths:
    SwappedImports(
        _options.packages,
        [Path(path) for path in _options.paths],
        report=lambda name: _write(swapped=name),
    ).install()


def neutral(text: str) -> str:
    """Return a text without addresses, temporary folders and the name of the library."""
    # Shorter numbers are not addresses, and a test may differ in them.
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    # The folder of tmp_path; workers of pytest-xdist have one each, named popen-gw0.
    text = re.sub(r"\S*pytest-of-\S+?/pytest-\d+(/popen-gw\d+)?", "TMP", text)
    # repr() of a class shows where torch defines it; modkit's has the public name.
    text = text.replace("torch.nn.modules.module.Module", "torch.nn.Module")
    return re.sub(r"\bmodkit\.(nn|jit|optim)\b", r"torch.\1", text)


def _id(nodeid: str) -> str:
    """Return the id of a test in the records: neutral, and unique among the collected tests."""
    return _ids.get(nodeid) or neutral(nodeid)


def _listed(name: str) -> set[str]:
    """Return the ids in a file beside the records: they may be too many for a command line."""
    file = Path(_options.outcomes) / f"{name}.json"
    return set(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else set()


def _first_line(error: BaseException) -> str:
    """Return the first line of the text of an exception, whose ``__str__`` may raise."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - the code of the user
        text = f"str() raises {type(failure).__name__}"
    return neutral(text).partition("\n")[0][:_TEXT]


def pytest_configure(config: pytest.Config) -> None:
    """Turn off what pytest-randomly does: the order and the seeds are those of the other side."""
    # Without the plugin, its options in ``addopts`` would be errors.
    config.option.randomly_reorganize = False
    config.option.randomly_reset_seed = False


def pytest_collectstart() -> None:
    """Seed before a file is collected: it may make its networks when it is imported."""
    seed()


# Before pytest's own hook, which sets up the fixtures: they may draw random numbers.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before each test, so that no test depends on the ones before it."""
    seed()


# Around the hooks of others, which may leave out tests, and change ids, as pytest-xdist does for
# ``--dist=loadgroup``.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Leave out the tests that are not to be repeated, and those that ran before a crash."""
    result = yield

    numbers: Counter[str] = Counter()
    for item in items:
        text = neutral(item.nodeid)
        numbers[text] += 1
        # Tests whose ids differ in an address alone.
        _ids[item.nodeid] = text if numbers[text] == 1 else f"{text} #{numbers[text]}"

    wanted = (_listed("only") or {*_ids.values()}) - _listed("done")
    left_out = [item for item in items if _ids[item.nodeid] not in wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        # In place, because pytest goes on with this list.
        items[:] = [item for item in items if _ids[item.nodeid] in wanted]
    return result


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


# Pytest in a test, as of pytester or of a process, would add its tests to the records.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Hide the plugin from the sessions of pytest that a test starts."""
    plugins = os.environ.get("PYTEST_PLUGINS", "")
    os.environ["PYTEST_PLUGINS"] = plugins.removesuffix(__name__).removesuffix(",")
    try:
        return (yield)
    finally:
        os.environ["PYTEST_PLUGINS"] = plugins


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the start of a test, so that a crash of the process names its test."""
    _write(test=_id(nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, Any, object]:
    """Keep class and text of the exception in the report, which may go to another process."""
    report = yield
    if call.excinfo is not None:
        # Plain data, which pytest-forked can write.
        report.modkit_raised = [call.excinfo.typename, _first_line(call.excinfo.value)]
    return report


# Not a TestReport: plugins have outcomes, phases and attributes that it does not declare.
def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst outcome over the phases and subtests of a test."""
    # The worker that ran the test has recorded it, if pytest-xdist hands on the report.
    if hasattr(report, "node"):
        return

    outcome: str = report.outcome
    # Pytest reports an expected failure as skipped, and an unexpected pass as passed.
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    # pytest-forked reports a crash so, in no phase.
    elif report.when == "???":
        outcome = "cut off"
    # Outside of the call, a fixture has failed and not the test: an error in pytest's summary.
    elif outcome == "failed" and report.when != "call":
        outcome = "error"
    # pytest-rerunfailures runs the test again, and what this attempt gave does not count.
    elif outcome == "rerun":
        _worst.pop(report.nodeid, None)
        return

    before = _worst.setdefault(report.nodeid, {"outcome": "passed"})
    if _SEVERITY.index(outcome) > _SEVERITY.index(before["outcome"]):
        line = {"outcome": outcome}
        if outcome in {"xfailed", "failed", "error"}:
            line["raised"], line["text"] = getattr(report, "modkit_raised", ("", ""))
            line["traceback"] = report.longreprtext[-_TRACEBACK:]
        _worst[report.nodeid] = line


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write the outcome of the test, in the process that ran it."""
    line = _worst.pop(nodeid, None)
    if line is not None:
        _write(test=_id(nodeid), **line)


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
