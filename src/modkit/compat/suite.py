"""A pytest suite on torch and on modkit, compared test by test."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from modkit.compat.swapped_imports import UNTOUCHED, VARIABLE, Options, untouched


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SIDES: Final = ("torch", "modkit")
# How often a test that differs is run again on each side, to tell modkit's faults from chance.
REPEATS: Final = 3
# Exit codes of pytest after which there are outcomes to compare: all passed, some failed.
_RAN: Final = (0, 1)
_NO_TESTS: Final = 5
# Interrupted, by a file that cannot be collected too; wrong arguments; no tests. Others end a
# process in the middle of a test: a signal, ``os._exit``, ``pytest.exit``.
_OF_PYTEST: Final = (2, 4, _NO_TESTS)
# The folder that holds one of these is the user's project.
_PROJECT_FILES: Final = (
    *("pyproject.toml", "setup.py", "setup.cfg", "tox.ini", ".git"),
    *("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"),
)
_TESTS: Final = ("tests", "test")
# As ``python -m pytest``, but the plugin is there before those of ``-p``, which may import what is
# to be rewritten.
_START: Final = (
    "import os, sys; sys.path[:] = [folder or os.getcwd() for folder in sys.path]; "
    "import modkit.compat.pytest_plugin, pytest; sys.exit(pytest.main())"
)
# Differences that the exception alone shows, by what torch does in their row of the table, which is
# docs/differences.md.
LISTED: Final[Mapping[str, str]] = {
    r"modkit: TypeError: metaclass conflict": "A class can have any metaclass",
    r"modkit: OSError: .*(source code|class definition)": "`inspect.getsource(nn.Module)` shows",
    r"modkit: PackagingError: ": "`torch.package` leaves torch out of a package",
    r"modkit: UserWarning: .*took none of": "`load_state_dict(strict=False)` that takes none",
    r"modkit: NameMismatchError: ": "A model whose parameters have other names",
    r"modkit: FileError: ": "Checksums of archives are ignored",
    r"torch: RuntimeError: OrderedDict mutated during iteration": "A load hook that removes itself",
    r"torch: DeprecationWarning: `torch\.jit\.": "Each call of `torch.jit.script`",
    r"torch: \w+: .*get_(ema|swa)_\w*avg_fn\.<locals>": "The averaging functions are closures",
}

Kind = Literal["equal", "listed", "unlisted", "unsteady"]
_UNSTEADY_ON_TORCH: Final = "unsteady on torch"
_EQUAL_AGAIN: Final = f"equal in {REPEATS} further runs"


class SuiteError(Exception):
    """A suite could not be run, so there is nothing to compare."""


class Outcome(NamedTuple):
    """Outcome of a test: pytest's word, and the class and first line of its exception."""

    outcome: str
    raised: str = ""
    text: str = ""

    def __str__(self) -> str:
        exception = ": ".join(filter(None, (self.raised, self.text)))
        return f"{self.outcome} ({exception})" if exception else self.outcome


NOT_RUN: Final = Outcome("not run")
# Outcomes of a test whose own code did not run.
_NOTHING_RAN: Final = frozenset({"error", "skipped", "uncollected", "cut off"})
Outcomes = dict[str, Outcome]


@dataclass(frozen=True)
class Suite:
    """A suite of pytest, and what imports modkit in place of torch on modkit's side.

    Args:
        tests: Paths and test ids for pytest.
        paths: Folders and files whose modules are rewritten as they are imported.
        packages: Names of installed packages whose modules are rewritten as well.
        arguments: Further arguments for pytest.
        folder: Working directory of the runs. Default: the current one.
        environment: Variables that are set for the runs.
        processes: Workers of pytest-xdist in each run; 0 runs without it.
        keep_going: If True, go on when a file cannot be collected and when a process crashes.
        seconds: Time limit of a run, or None.
    """

    tests: Sequence[str]
    paths: Sequence[Path]
    packages: Sequence[str] = ()
    arguments: Sequence[str] = ()
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 0
    keep_going: bool = False
    seconds: float | None = None

    def command(self, cache: Path) -> list[str]:
        """Return the command of a run."""
        # The hook that rewrites assertions would read the files itself, without modkit in them.
        command = [sys.executable, "-c", _START, "-q", "--assert=plain", "--tb=short"]
        # Without the plugin of the cache, its options and fixture would be errors. A project whose
        # own options stop at the first failure is compared as a whole.
        command += ["-o", f"cache_dir={cache}", "--maxfail=0"]
        if self.processes:
            command += ["-n", str(self.processes)]
        if self.keep_going:
            command.append("--continue-on-collection-errors")
        return [*command, *self.arguments, *self.tests]


class Recorded(NamedTuple):
    """The records of all processes of a run; ``finished`` if pytest ended by itself."""

    outcomes: Outcomes
    tracebacks: dict[str, str]
    swapped: set[str]
    collected: int
    finished: bool


class TestResult(NamedTuple):
    """Outcomes of one test on both sides: the first run, then the repeated ones."""

    test: str
    kind: Kind
    torch: list[Outcome]
    modkit: list[Outcome]
    reason: str
    traceback: str


class SuiteReport(NamedTuple):
    """The comparison of a suite.

    ``differing`` has the tests whose first outcomes differed; ``swapped`` names the modules that
    imported modkit in place of torch.
    """

    counts: dict[str, dict[str, int]]
    differing: list[TestResult]
    swapped: list[str]
    seconds: float

    def number(self, kind: Kind) -> int:
        """Return the number of tests of one kind."""
        if kind == "equal":
            ran_on_torch = [result for result in self.differing if result.torch[0] != NOT_RUN]
            return sum(self.counts["torch"].values()) - len(ran_on_torch)
        return sum(result.kind == kind for result in self.differing)


def project_of(path: Path) -> Path:
    """Return the folder of the project that a path of tests belongs to.

    Without a file of a project, it is the folder around a folder named ``tests`` or ``test``.
    """
    start = path.resolve()
    start = start if start.is_dir() else start.parent
    for folder in (start, *start.parents):
        if any((folder / name).exists() for name in _PROJECT_FILES):
            return folder
    return next(
        (folder.parent for folder in (start, *start.parents) if folder.name in _TESTS), start
    )


def recorded(folder: Path) -> Recorded:
    """Read what all processes of a run have written.

    A test that started and did not end is "cut off": its process crashed or was stopped.
    """
    record = Recorded({}, {}, set(), 0, finished=False)
    for file in sorted(folder.glob("*.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            try:
                line: dict[str, Any] = json.loads(text)
            except ValueError:
                continue  # The last line of a process that was killed.
            if "swapped" in line:
                record.swapped.add(line["swapped"])
            elif "collected" in line:
                record = record._replace(collected=max(record.collected, line["collected"]))
            elif "finished" in line:
                record = record._replace(finished=True)
            elif "outcome" in line:
                test = line["test"]
                outcome = Outcome(line["outcome"], line.get("raised", ""), line.get("text", ""))
                record.outcomes[test] = outcome
                record.tracebacks[test] = line.get("traceback", "")
            else:
                # The start of a test. Its outcome replaces this, if the process gets so far.
                record.outcomes.setdefault(line["test"], Outcome("cut off"))
    return record


def run(
    suite: Suite,
    *,
    swap: bool,
    folder: Path,
    tests: Sequence[str] = (),
    progress: Callable[[float], object] = lambda fraction: None,
) -> Recorded:
    """Run a suite, or some of its tests, in a new process."""
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(str(folder))
    if swap:
        options = options._replace(packages=suite.packages, paths=[str(p) for p in suite.paths])
    plugins = [os.environ.get("PYTEST_PLUGINS", ""), "modkit.compat.pytest_plugin"]
    environment = {
        **os.environ,
        # Sets of strings then have the same order on both sides.
        "PYTHONHASHSEED": "0",
        **suite.environment,
        VARIABLE: json.dumps(options._asdict()),
        "PYTEST_PLUGINS": ",".join(filter(None, plugins)),
    }
    command = suite.command(folder / "cache")
    if tests:
        # Pytest does not know these ids, which are neutral, and a command line has a limit.
        (folder / "only.json").write_text(json.dumps(list(tests)), encoding="utf-8")

    while True:
        before = len(recorded(folder).outcomes)
        status = _wait(command, suite, environment, folder, progress)
        record = recorded(folder)
        # Tests that are repeated may also crash: what has no outcome counts as not run. A test that
        # ends its process may choose a status of pytest.
        if status is None or (status in _RAN and record.finished) or tests:
            return record
        # After a crash in the last test, no test is left.
        if before and status == _NO_TESTS:
            return record
        # A new process leaves out the tests that are recorded, the one that crashed included.
        done = json.dumps(list(record.outcomes))
        (folder / "done.json").write_text(done, encoding="utf-8")
        crashed = status not in _OF_PYTEST and len(record.outcomes) > before
        if not (crashed and suite.keep_going):
            raise SuiteError(_failure(status, record, folder, "modkit" if swap else "torch"))


def _wait(
    command: Sequence[str],
    suite: Suite,
    environment: Mapping[str, str],
    folder: Path,
    progress: Callable[[float], object],
) -> int | None:
    """Run a command to its end, and return its exit status; None at its time limit."""
    started = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        # A session of its own, so that the processes which tests start end with it.
        process = subprocess.Popen(  # noqa: S603 - the tests of the user
            command,
            cwd=suite.folder,
            env=environment,
            stdout=log,
            stderr=log,
            # A test that reads from the terminal fails at once, where it would wait for ever.
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    # Not more often: each look reads all records.
                    return process.wait(timeout=2.0)
                except subprocess.TimeoutExpired:
                    record = recorded(folder)
                    progress(len(record.outcomes) / max(record.collected, 1))
                if suite.seconds is not None and time.monotonic() - started > suite.seconds:
                    # The tests that ran are compared.
                    return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    if process.poll() is None:
        # Windows has no process groups.
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _failure(status: int, record: Recorded, folder: Path, side: str) -> str:
    """Return why a run gave nothing to compare."""
    last = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip()
    last = " / ".join(list(filter(str.strip, last.splitlines()))[-3:])
    tests = [test for test, outcome in record.outcomes.items() if outcome[0] == "cut off"]
    if status < 0 or (tests and status not in _OF_PYTEST):
        cause = f"signal {-status}" if status < 0 else f"status {status}"
        return (
            f"the process that ran the tests on {side} ended with {cause} in "
            f"{', '.join(tests) or 'no test'}; --keep-going runs the other tests"
        )
    # Pytest calls a run interrupted if a file cannot be collected, and if it stops at a failure.
    if status == 2 and "uncollected" in counted(record.outcomes):
        return (
            f"pytest could not collect the tests on {side} (--keep-going runs the others): {last}"
        )
    return f"pytest ended with status {status} on {side}: {last}"


def require_a_test(outcomes: Outcomes) -> None:
    """Refuse a suite of which nothing ran on torch: both sides would be equal, and say nothing."""
    if not {outcome.outcome for outcome in outcomes.values()} <= _NOTHING_RAN:
        return
    counts = ", ".join(f"{number} {word}" for word, number in counted(outcomes).items())
    causes = Counter(outcome._replace(outcome="") for outcome in outcomes.values() if outcome.text)
    cause = "".join(f": {most.raised} {most.text}" for most, _ in causes.most_common(1))
    raise SuiteError(f"no test could be run on torch ({counts}), so nothing is compared{cause}")


def differing(sides: Mapping[str, Outcomes]) -> list[str]:
    """Return the tests whose outcomes differ between the sides."""
    tests = {test: None for outcomes in sides.values() for test in outcomes}
    return [
        test
        for test in tests
        if len({outcomes.get(test, NOT_RUN) for outcomes in sides.values()}) > 1
    ]


def listed_difference(torch: Outcome, modkit: Outcome) -> str:
    """Return the row of the table of differences that an exception shows, or an empty string."""
    exceptions = {f"torch: {torch.raised}: {torch.text}", f"modkit: {modkit.raised}: {modkit.text}"}
    for pattern, reason in LISTED.items():
        if any(re.match(pattern, exception) for exception in exceptions):
            return f"docs/differences.md: {reason}"
    return ""


def unsteady(torch: Sequence[Outcome], modkit: Sequence[Outcome]) -> str:
    """Return why a difference in the first run is not one of modkit, or an empty string."""
    # A test that a repeated run lacks was not repeated.
    if NOT_RUN in {*torch[1:], *modkit[1:]}:
        return ""
    # Without the text of the exception, which may quote random numbers.
    words = {outcome[:2] for outcome in torch}
    if len(set(torch)) > 1 and {outcome[:2] for outcome in modkit} <= words:
        return _UNSTEADY_ON_TORCH
    # Each repeated run gave what torch gave at first: modkit's first outcome was chance.
    if set(torch[1:]) == set(modkit[1:]) == {torch[0]}:
        return _EQUAL_AGAIN
    return ""


def repeated(
    suites: Mapping[str, Suite], firsts: Mapping[str, Outcomes], folder: Path
) -> dict[str, dict[str, list[Outcome]]]:
    """Run the tests again whose outcomes differ between the sides."""
    doubtful = differing(firsts)
    runs = {test: {side: [firsts[side].get(test, NOT_RUN)] for side in suites} for test in doubtful}
    for repeat in range(REPEATS if doubtful else 0):
        for side, suite in suites.items():
            again = run(
                suite,
                swap=side != "torch",
                folder=folder / f"{side}-{repeat}",
                tests=doubtful,
            )
            for test in doubtful:
                runs[test][side].append(again.outcomes.get(test, NOT_RUN))
    return runs


def compare_suite(
    suite: Suite, progress: Callable[[float], object] = lambda fraction: None
) -> SuiteReport:
    """Run a suite on torch and on modkit, run what differs again, and compare."""
    needed = {"pytest": "--tests", **({"xdist": "-n"} if suite.processes else {})}
    for module, option in needed.items():
        if importlib.util.find_spec(module) is None:
            name = {"xdist": "pytest-xdist"}.get(module, module)
            raise SuiteError(f"{option} needs {name}, which is not installed: pip install {name}")

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="modkit-compat-") as temporary:
        records: dict[str, Recorded] = {}
        for index, side in enumerate(SIDES):

            def advance(fraction: float, done: int = index) -> None:
                # The index is a default: a closure would read the variable when it is called.
                progress((done + fraction) / len(SIDES))

            records[side] = run(
                suite,
                swap=side == "modkit",
                folder=Path(temporary) / side,
                progress=advance,
            )
            if side == "torch":
                require_a_test(records[side].outcomes)

        if unused := untouched(suite.packages, records["modkit"].swapped):
            raise SuiteError(f"--swap {unused[0]}: {UNTOUCHED}")
        # Both runs were on torch, and a report of equal outcomes would say nothing of modkit.
        if not records["modkit"].swapped:
            raise SuiteError(
                f"no module below {', '.join(map(str, suite.paths))} uses torch.nn, torch.jit or "
                "torch.optim.swa_utils; --swap names installed packages that do"
            )

        firsts = {side: record.outcomes for side, record in records.items()}
        runs = repeated(dict.fromkeys(SIDES, suite), firsts, Path(temporary))

    return SuiteReport(
        counts={side: counted(outcomes) for side, outcomes in firsts.items()},
        differing=[
            judged(test, sides["torch"], sides["modkit"], _traceback(records, test))
            for test, sides in runs.items()
        ],
        swapped=sorted(records["modkit"].swapped),
        seconds=time.monotonic() - started,
    )


def judged(
    test: str, torch: list[Outcome], modkit: list[Outcome], traceback: str = ""
) -> TestResult:
    """Return the result of a test whose first outcomes differed."""
    kind: Kind = "unlisted"
    if reason := unsteady(torch, modkit):
        kind = "unsteady"
    elif reason := listed_difference(torch[0], modkit[0]):
        kind = "listed"
    return TestResult(test, kind, torch, modkit, reason, traceback)


def counted(outcomes: Outcomes) -> dict[str, int]:
    """Return the number of tests by outcome."""
    return dict(sorted(Counter(outcome.outcome for outcome in outcomes.values()).items()))


def _traceback(records: Mapping[str, Recorded], test: str) -> str:
    """Return the traceback on modkit, or the one on torch if only torch raised."""
    return next(
        filter(None, (records[side].tracebacks.get(test) for side in ("modkit", "torch"))), ""
    )
