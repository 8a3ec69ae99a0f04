"""The committed results of the sessions that the documentation shows."""

import json
import runpy
from pathlib import Path

from tests.divergences import DIVERGENCES
from tests.suites.libraries import LIBRARIES


ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def results(name):
    """Return the results of the last run."""
    return json.loads((DOCS / "_render" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_modkit_compat_found_no_unlisted_difference():
    """On no release of torch, and in no model of a library."""
    found = results("modkit_compat")

    assert {run["areas"]["all"]["unlisted"] for run in found["behaviors"].values()} == {0}
    assert {run["counts"][-1] for run in found["models"].values()} == {0}


def test_no_test_failed():
    """No complete run, on a release of torch or on a device, had a failing test."""
    stored = results("test_runs")
    runs = [*stored["tests"], *stored["devices"]]

    assert [run for run in runs if run["failed"]] == []


def test_no_file_was_lost():
    """Every trial with a fault while writing left a complete file."""
    rows = results("write_faults")["faults"]
    cells = [cell for row in rows.values() for cell in row["cells"].values()]

    assert [cell["lost"] for cell in cells if "skipped" not in cell and cell["lost"]] == []


def test_no_difference_of_random_operations_was_left():
    """Each difference of the last run was a row of the table of differences."""
    found = results("random_operations")

    assert found["differences"] == []
    assert {*found["rows"]} <= {*DIVERGENCES}
    assert found["operations"] == sum(found["kinds"].values())


def test_bugs_that_random_operations_found_have_tests():
    """Each names a test that exists."""
    fixed = runpy.run_path(str(DOCS / "render.py"))["test_evidence"].FIXED
    tests = [test.partition("::") for test in fixed.values()]

    assert [
        name for file, _, name in tests if f"def {name}(" not in (ROOT / file).read_text("utf-8")
    ] == []


def test_every_differing_test_of_a_suite_has_a_cause():
    """No probe differed, and each test of a third-party library that did is explained."""
    found = results("library_suites")
    rows = [*found["suites"].values(), *found["torch's tests"].values()]
    tests = [test for row in rows for test in row["differing"]]

    assert [test["test"] for test in tests if not test["cause"]] == []
    assert [
        name for name, row in found["probes"].items() if row["differing"] or row["raised"]
    ] == []


def test_the_suites_are_of_the_pinned_versions():
    """Each suite runs against the installed version that its tests come from."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    # A repository has the library beside the tests, unless it must be built.
    versions = [
        f"{library.name.replace('_', '-')}=={library.version}"
        for library in LIBRARIES
        if library.packages or not library.repository
    ]

    assert [
        version
        for version in versions
        if not any(pin.split(" ")[0].lower() == version for pin in pins)
    ] == []


def test_a_side_that_swapped_nothing_counts_no_test():
    """Where no module imported modkit, the side ran on torch again and proves nothing."""
    tested_with = runpy.run_path(str(DOCS / "render.py"))["tested_with"]
    sides = {side: {"passed": 5} for side in ("torch", "whole", "user")}
    row = {"sides": sides, "differing": [], "swapped modules": {"whole": 3, "user": 0}}

    assert tested_with.cells(row) == ["5", "5", "5", "-", "0"]
    assert tested_with.totals({"library": row}) == [5, 5, 5, 0, 0]
    assert tested_with.cells({**row, "swapped modules": {"whole": 3, "user": 2}})[3] == "5"

    sides.pop("whole")
    assert tested_with.cells(row) == ["5", "5", "-", "-", "0"]


def measured_code():
    """Return the module that compares figures with the code that they were measured on."""
    return runpy.run_path(str(DOCS / "render.py"))["measured_code"]


def test_pages_say_which_code_has_changed_since_a_measurement(monkeypatch, tmp_path):
    """Changed code makes figures old; comments, docstrings and blank lines do not."""
    module = measured_code()
    source = tmp_path / "nn" / "module.py"
    source.parent.mkdir()
    source.write_text('"""Text."""\n\nvalue = 1  # a comment\n', encoding="utf-8")
    monkeypatch.setattr(module, "SOURCE", tmp_path)
    monkeypatch.setattr(module, "DESCRIBED", {"benchmarks": ("nn", "jit", "files")})
    stored = {"code": module.digests(("nn", "jit", "files"))}
    monkeypatch.setattr(module, "read", lambda name: stored)
    assert module.note("benchmarks") == ""

    source.write_text('"""Another text."""\nvalue = 1\n\n# More.\n', encoding="utf-8")
    assert (module.note("benchmarks"), module.outdated()) == ("", [])
    source.write_text("value = 2\n", encoding="utf-8")
    assert module.note("benchmarks") == "The code of `nn` has changed since."
    assert module.outdated() == ["benchmarks: nn"]
    stored["code"]["jit"] = "other"
    assert module.note("benchmarks") == "The code of `nn` and `jit` has changed since."
    stored.clear()
    assert module.note("benchmarks") == "These figures are of an older version of the code."


def test_every_result_with_times_is_compared_with_the_code():
    """A result has times if a page names what it was measured on."""
    module = measured_code()
    parts = {path.name for path in module.SOURCE.iterdir() if path.is_dir()}

    assert {*module.DESCRIBED} == {"benchmarks", "averaging_libraries"}
    for described in module.DESCRIBED.values():
        assert {*described} - {module.FOUNDATION} <= parts
        assert len({*module.digests(described).values()}) == len(described)


def test_no_training_script_differs():
    """Neither between torch and modkit, nor after resuming with an average."""
    scripts = results("training_scripts")["scripts"]
    averages = [row["average"] for row in scripts.values() if "average" in row]

    assert [row["differing"] for row in [*scripts.values(), *averages] if row["differing"]] == []
    assert len(scripts) >= 10
    assert len(averages) >= 5
    assert all(row["losses"] and row["modules of modkit"] for row in scripts.values())
    assert all(0 < average["of them resumed"] < average["losses"] for average in averages)
