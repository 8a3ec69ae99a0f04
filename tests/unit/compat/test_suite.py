"""``modkit compat --tests``: a pytest suite of a user on torch and on modkit."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from modkit.compat import suite as suites
from modkit.compat.suite import (
    LISTED,
    NOT_RUN,
    Outcome,
    Suite,
    SuiteError,
    compare_suite,
    judged,
    project_of,
    require_a_test,
)
from modkit.compat.swapped_imports import SwappedImports
from tests.divergences import ROWS
from tests.processes import python
from tests.unit.cli.command_line import invoke


PASSED, FAILED = Outcome("passed"), Outcome("failed", "ValueError", "no")
NETWORK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)
"""
CONFTEST = """
import pytest
from package.network import Net


@pytest.fixture
def net():
    return Net()
"""
TESTS = """
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parent


def test_equal(net):
    assert net(torch.ones(1, 2)).shape == (1, 2)


def test_seeded():
    assert random.random() == pytest.approx(0.8444218515250481)


def test_both_raise(net):
    raise ValueError(f"{net!r} at {id(net):#x}")


def test_differs(net):
    assert type(net).__bases__[0].__module__.startswith("torch.")


class Meta(type):
    pass


def test_metaclass():
    class Net(nn.Module, metaclass=Meta):
        pass


def test_unsteady(net):
    runs = FOLDER / "runs"
    runs.touch()
    runs.write_text(runs.read_text() + "x")
    assert len(runs.read_text()) % 4 < 2


@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number, tmp_path):
    if number == 1:
        pytest.skip("no")
    raise OSError(str(tmp_path))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The project of a user: a package, tests that use it, and a virtual environment inside."""
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "package/__init__.py": "",
        "package/network.py": NETWORK,
        "tests/conftest.py": CONFTEST,
        "tests/test_network.py": TESTS,
        ".venv/lib/site-packages/installed.py": "from torch.nn import Module\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suites, "REPEATS", 1)
    return tmp_path


@pytest.fixture
def _forked(monkeypatch):
    """Fork the processes of a suite from one that has imported torch."""

    def wait(command, suite, environment, folder, progress):
        log = folder / "log.txt"
        start = f"import os, sys; sys.path.insert(0, os.getcwd()); {command[2]}"
        found = python(start, *command[3:], env=environment, stdout=log)
        log.write_text(log.read_text() + found.stderr)
        return found.returncode

    monkeypatch.setattr(suites, "_wait", wait)


@pytest.mark.usefixtures("_forked")
def test_a_suite_is_compared_test_by_test(project):
    """Each difference is repeated, and one that is listed or unsteady is not an error by itself."""
    before = {file: file.read_bytes() for file in project.rglob("*.py")}
    result = invoke("compat", "--tests", "tests", "--json")
    report = json.loads(result.stdout)
    differing = {each["test"].partition("::")[2]: each for each in report["differing"]}

    assert result.exit_code == 1
    assert {name: each["kind"] for name, each in differing.items()} == {
        "test_differs": "unlisted",
        "test_metaclass": "listed",
        "test_unsteady": "unsteady",
    }
    assert differing["test_differs"]["torch"] == ["passed", "passed"]
    assert differing["test_differs"]["modkit"] == ["failed (AssertionError)"] * 2
    assert "in test_differs" in differing["test_differs"]["traceback"]
    assert report["tests"] == {"equal": 5, "listed": 1, "unlisted": 1, "unsteady": 1}
    assert report["swapped"] == ["package.network", "test_network"]
    assert {file: file.read_bytes() for file in project.rglob("*.py")} == before


PLUGIN = """
import pickle
import os
import sys
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

sys.path.insert(0, str(Path(__file__).parents[1]))
from package.network import Net


@pytest.fixture
def net_of_plugin():
    return Net()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if not item.get_closest_marker("forked"):
        return None
    # As pytest-forked does.
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    read, write = os.pipe()
    if not os.fork():
        reports = [report._to_json() for report in runtestprotocol(item, log=False)]
        os.write(write, pickle.dumps(reports))
        os._exit(0)
    os.wait()
    for report in pickle.loads(os.read(read, 1 << 16)):
        item.ihook.pytest_runtest_logreport(report=pytest.TestReport._from_json(report))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
EDGES = """
import os
from pathlib import Path

import pytest
from torch import nn

# Torch's Module derives from object alone, and modkit's from torch's.
ON_TORCH = nn.Module.__mro__[1] is object


class Unprintable(Exception):
    def __str__(self):
        return self.message


@pytest.mark.parametrize("seed", [0xDEADBEEF, 0xCAFEBABE], ids=hex)
def test_address(seed):
    assert seed == 0xDEADBEEF or ON_TORCH


@pytest.mark.forked
def test_forked():
    assert ON_TORCH


@pytest.mark.parametrize("library", [nn.Module.__module__.partition(".")[0]])
def test_one_side(library):
    pass


def test_plugin(net_of_plugin):
    assert type(net_of_plugin).__mro__[2] is object


@pytest.mark.xfail
def test_xfail():
    raise (ValueError if ON_TORCH else TypeError)


def test_unsteady():
    runs = Path(__file__).with_name("runs")
    runs.touch()
    runs.write_text(runs.read_text() + "x")
    assert len(runs.read_text()) % 4 < 2


@pytest.mark.forked
def test_forked_fails():
    raise ValueError("in a process")


def test_cache(cache):
    assert cache.get("nothing", 1) == 1


def test_class_in_text():
    raise ValueError(f"{nn.Module} and {nn.Linear}")


def test_inner_session(tmp_path):
    file = tmp_path / "test_inner.py"
    file.write_text("def test_inner(): assert 0")
    assert pytest.main(["-c", os.devnull, "-p", "no:cacheprovider", str(file)]) == 1


def test_unprintable():
    raise Unprintable
"""


@pytest.mark.usefixtures("_forked")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a test runs in a forked process")
def test_what_could_hide_a_difference(project, monkeypatch):
    """Each test counts, however it runs, whatever its id is, and from whichever folder."""
    options = '[pytest]\naddopts = ["-p", "plugin", "--ff"]\nmarkers = ["forked"]\n'
    (project / "pyproject.toml").unlink()
    (project / "pytest.toml").write_text(options)
    (project / "package/plugin.py").write_text(PLUGIN)
    (project / "tests/conftest.py").unlink()
    (project / "tests/test_network.py").write_text(EDGES)
    # The root of pytest, to which ids are relative, is the folder above.
    monkeypatch.chdir(project / "package")
    result = invoke("compat", "--tests", "../tests", "--json")

    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    differing = {each["test"].partition("::")[2]: each for each in report["differing"]}

    assert {name: each["kind"] for name, each in differing.items()} == {
        "test_address[0x] #2": "unlisted",
        "test_forked": "unlisted",
        "test_one_side[torch]": "unlisted",
        "test_one_side[modkit]": "unlisted",
        "test_plugin": "unlisted",
        "test_xfail": "unlisted",
        "test_unsteady": "unsteady",
    }
    assert differing["test_forked"]["modkit"] == ["failed (AssertionError)"] * 2
    assert differing["test_one_side[torch]"]["modkit"] == ["not run"] * 2
    assert differing["test_xfail"]["torch"] == ["xfailed (ValueError)"] * 2
    assert report["tests"]["equal"] == 6
    assert report["counts"]["torch"] == {"failed": 3, "passed": 8, "xfailed": 1}
    assert report["swapped"] == ["package.network", "test_network"]
    assert not (project / ".pytest_cache").exists()


@pytest.mark.usefixtures("_forked")
def test_equal_suites_succeed(project):
    """Arguments behind ``--`` are for pytest, each worker of ``-n`` swaps imports, and a table is shown."""
    result = invoke(
        "compat", "--tests", "tests/test_network.py", "-n", "1", "--", "-k", "equal or both"
    )

    assert result.exit_code == 0
    assert "2 equal, 0 differing" in result.stdout
    assert "running the tests on torch, then with modkit in" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tests", "nowhere"], "there is no nowhere"),
        (["--tests", "tests", "--area", "x"], "--tests takes only"),
        (["--tests", "tests", "--input", "1,2"], "--tests takes only"),
        (["-n", "2"], "need --tests"),
        (["--keep-going", "a:B"], "need --tests"),
        (["a:B", "c:D"], "one TARGET is compared at a time, got 2"),
        (["--tests", "tests", "--", "--bogus"], "unrecognized arguments: --bogus"),
        (["--tests", "tests", "--", "-k", "nothing"], "pytest ended with status 5 on torch"),
        (
            ["--tests", "tests", "--swap", "nowhere", "--", "-k", "equal"],
            "--swap nowhere: none of its modules was imported, or none uses torch.nn",
        ),
    ],
)
@pytest.mark.usefixtures("project", "_forked")
def test_errors(arguments, text):
    """A suite that cannot be run is an error of status 2, with the last lines of pytest."""
    result = invoke("compat", *arguments)

    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.usefixtures("_forked")
def test_a_suite_without_torch_is_an_error(project):
    """If nothing would change, nothing is compared; the error names the option for other packages."""
    (project / "tests/conftest.py").unlink()
    (project / "tests/test_network.py").write_text("def test_number():\n    assert 1\n")
    result = invoke("compat", "--tests", "tests")

    assert result.exit_code == 2
    assert "uses torch.nn, torch.jit or torch.optim.swa_utils; --swap names" in result.stderr


@pytest.mark.usefixtures("_forked")
def test_a_suite_that_does_not_run_is_an_error(project):
    """Tests that cannot be collected on torch would be equal on both sides."""
    (project / "tests/test_network.py").write_text("import nowhere_at_all\n")
    result = invoke("compat", "--tests", "tests", "--keep-going")

    assert result.exit_code == 2
    text = "no test could be run on torch (1 uncollected), so nothing is compared: "
    assert text in result.stderr
    assert "nowhere_at_all" in result.stderr


@pytest.mark.parametrize("word", ["error", "skipped", "uncollected", "cut off"])
def test_outcomes_of_tests_that_did_not_run(word):
    """One test that ran is enough."""
    with pytest.raises(SuiteError, match=rf"\(2 {word}\), so nothing is compared: ValueError no"):
        require_a_test(dict.fromkeys("ab", Outcome(word, "ValueError", "no")))

    require_a_test({"a": Outcome(word), "b": FAILED})


CRASHES = """
import os
from torch import nn


def test_first():
    assert nn.Module.__module__.startswith("torch.")


def test_crashes():
    os.abort()


def test_last():
    assert nn.Linear
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "cause"),
    [
        ("os.abort()", "signal 6"),
        ("os._exit(0)", "status 0"),
        ("__import__('pytest').exit('', 0)", "status 0"),
    ],
)
def test_a_crash(crash, cause, project):
    """A crash ends the comparison, and with ``--keep-going`` the other tests run."""
    (project / "tests/test_network.py").write_text(CRASHES.replace("os.abort()", crash))
    stopped = invoke("compat", "--tests", "tests/test_network.py")

    assert stopped.exit_code == 2
    assert f"ended with {cause} in tests/test_network.py::test_crashes" in stopped.stderr
    assert "--keep-going runs the other tests" in stopped.stderr

    (project / "tests/test_broken.py").write_text("import nowhere_at_all\n")
    report = compare_suite(Suite(["tests"], [project], keep_going=True))

    counts = {"cut off": 1, "passed": 2, "uncollected": 1}
    assert report.counts == {
        "torch": counts,
        "modkit": {**counts, "failed": 1, "passed": 1},
    }
    assert [result.test for result in report.differing] == ["tests/test_network.py::test_first"]


@pytest.mark.parametrize("status", [0, 1])
def test_a_process_that_a_test_ends(status, tmp_path, monkeypatch):
    """Its status may be one of pytest, so the record of the end is what counts."""
    records = tmp_path / "records"

    def start(*_: object) -> int:
        (records / "1.jsonl").write_text('{"test": "test_a.py::test_b"}\n')
        (records / "log.txt").write_text("")
        return status

    monkeypatch.setattr(suites, "_wait", start)
    with pytest.raises(SuiteError, match=rf"status {status} in test_a.py::test_b; --keep-going"):
        suites.run(Suite(["tests"], [tmp_path]), swap=False, folder=records)


WAITS = """
import os
import time
from pathlib import Path
from torch import nn


def test_waits():
    Path("started").write_text(str(os.getpid()))
    time.sleep(120)
"""


@pytest.mark.skipif(os.name == "nt", reason="terminating a process runs no code on Windows")
def test_a_terminated_comparison_ends_its_tests(project):
    """SIGTERM, with which CI cancels a job, leaves no process of the suite behind."""
    (project / "tests/test_network.py").write_text(WAITS)
    started = project / "started"
    command = [sys.executable, "-m", "modkit", "compat", "--tests", "tests"]
    with subprocess.Popen(command, cwd=project, stderr=subprocess.DEVNULL) as comparison:
        while not (started.exists() and started.read_text()):
            assert comparison.poll() is None
            time.sleep(0.1)
        comparison.terminate()
        status = comparison.wait(timeout=60)

    assert status == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.parametrize(
    ("torch", "modkit", "kind"),
    [
        ([PASSED] * 3, [FAILED] * 3, "unlisted"),
        ([PASSED, FAILED, PASSED], [FAILED] * 3, "unsteady"),
        ([PASSED] * 3, [FAILED, PASSED, PASSED], "unsteady"),
        ([FAILED, FAILED._replace(text="1"), FAILED], [FAILED._replace(text="2")] * 3, "unsteady"),
        ([PASSED, FAILED, PASSED], [Outcome("failed", "KeyError")] * 3, "unlisted"),
        ([PASSED] * 3, [NOT_RUN] * 3, "unlisted"),
        ([PASSED, NOT_RUN], [NOT_RUN, NOT_RUN], "unlisted"),
        ([FAILED, NOT_RUN], [NOT_RUN, FAILED], "unlisted"),
        ([PASSED], [Outcome("failed", "FileError", "x is corrupt")], "listed"),
        (
            [Outcome("failed", "DeprecationWarning", "`torch.jit.script` is deprecated.")],
            [PASSED],
            "listed",
        ),
    ],
)
def test_kinds(torch, modkit, kind):
    """A test whose outcomes on torch change is unsteady, if modkit's are among them."""
    assert judged("test", torch, modkit).kind == kind


def test_listed_differences_are_rows_of_the_one_table():
    """Each reason begins one row, which has the rest."""
    assert [
        reason
        for reason in LISTED.values()
        if sum(row.reason.startswith(reason) for row in ROWS) != 1
    ] == []
    assert all(re.compile(pattern) for pattern in LISTED)


def test_the_project_of_a_path(project):
    """The nearest folder with a file of a project; without one, the folder of the tests."""
    assert project_of(project / "tests/test_network.py") == project
    assert project_of(project / "package") == project

    for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"):
        inner = project / name.replace(".", "_")
        inner.mkdir()
        (inner / name).touch()
        assert project_of(inner) == inner


def test_the_project_of_tests_beside_a_package(tmp_path, monkeypatch):
    """Without a file of a project, the folder around the tests has the modules to rewrite."""
    monkeypatch.setattr("modkit.compat.suite._PROJECT_FILES", ())
    folder = tmp_path / "code" / "tests" / "unit"
    folder.mkdir(parents=True)

    assert project_of(folder / "test_network.py") == tmp_path / "code"
    assert project_of(tmp_path / "code" / "test_network.py") == tmp_path / "code"


def test_which_modules_are_swapped(project):
    """Modules below a path, except installed ones; a package by name wherever it lies."""
    installed = str(project / ".venv/lib/site-packages/installed.py")
    below = SwappedImports(paths=[project])
    named = SwappedImports(packages=["installed", "torch", "torch.testing._internal"])

    assert below.rewrites("package.network", str(project / "package/network.py"))
    assert not below.rewrites("package.data", str(project / "package/data.txt"))
    assert not below.rewrites("installed", installed)
    assert not below.rewrites("torch", torch.__file__)
    assert named.rewrites("installed", installed)
    assert not named.rewrites("package", str(project / "package/__init__.py"))
    assert not named.rewrites("torch.nn.functional", torch.nn.functional.__file__)
    # The models that torch has for its tests derive from Module as a user's models do.
    assert named.rewrites("torch.testing._internal.common_pruning", torch.testing.__file__)
