"""The committed results of the sessions that the documentation shows."""

import json
from pathlib import Path


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


def test_every_differing_test_of_a_suite_has_a_cause():
    """Each test of a third-party library that differed is explained."""
    found = results("library_suites")
    rows = [*found["suites"].values(), *found["torch's tests"].values()]
    tests = [test for row in rows for test in row["differing"]]

    assert [test["test"] for test in tests if not test["cause"]] == []


def test_no_training_script_differs():
    """Neither between torch and modkit, nor after resuming with an average."""
    scripts = results("training_scripts")["scripts"]
    averages = [row["average"] for row in scripts.values() if "average" in row]

    assert [row["differing"] for row in [*scripts.values(), *averages] if row["differing"]] == []
    assert len(scripts) >= 10
    assert len(averages) >= 5
    assert all(row["losses"] and row["modules of modkit"] for row in scripts.values())
    assert all(0 < average["of them resumed"] < average["losses"] for average in averages)
