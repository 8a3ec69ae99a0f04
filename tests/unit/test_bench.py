"""The harness of the benchmarks. No test asserts how long something takes."""

import json
from contextlib import ExitStack

import click.testing
import pytest

from benchmarks import (
    __main__ as command,
    averages,
    files,
    growth,
    measure,
    rows,
    scripts,
    workloads,
)
from tests.cases import for_each


def planted(name, budget, **options):
    """Make a row that takes next to no time, and always twice as long as its base."""
    arms = {"torch": lambda n: 1e-2 * n, "modkit": lambda n: 2e-2 * n, "limit": lambda n: 5e-3 * n}
    return measure.Row(name, budget, lambda _: {**arms, "torch.compile": "SomeError"}, **options)


ROWS = [planted("easy", 3.0, cold=4.0), planted("impossible", 1.9)]
MODELS = [planted("model", None, table="inference")]


@pytest.fixture
def _planted(monkeypatch):
    """Have three rows: one whose budget every run meets, and two that every run misses."""
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 1e-6)
    monkeypatch.setattr(rows, "OPERATIONS", ROWS)
    monkeypatch.setattr(files, "ROWS", [])
    monkeypatch.setattr(workloads, "rows", lambda *, with_compile: MODELS)
    monkeypatch.setattr(scripts, "rows", lambda checkouts: [])
    monkeypatch.setattr(averages, "ROWS", [])
    monkeypatch.setattr(growth, "SIZES", (10, 20))
    monkeypatch.setattr(growth, "TENSORS", (10, 20))


def bench(*arguments):
    """Run the benchmark as shortly as possible."""
    return click.testing.CliRunner().invoke(command.main, ["--seconds", "0.001", *arguments])


@pytest.mark.usefixtures("_planted")
def test_check_fails_where_a_budget_is_missed():
    """The exit status of ``--check`` is 1 if a budget of the chosen rows is missed."""
    assert bench("--check", "--only", "eas").exit_code == 0
    assert bench("--check", "--only", "eas", "--only", "impossible").exit_code == 1
    assert bench("--only", "impossible").exit_code == 0


@pytest.mark.usefixtures("_planted")
def test_files_have_everything(tmp_path):
    """JSON has the machine, all rows and all series; Markdown has their tables."""
    path, page = tmp_path / "new" / "bench.json", tmp_path / "bench.md"
    found = bench("--growth", "--json", str(path), "--markdown", str(page))

    written = json.loads(path.read_text(encoding="utf-8"))
    lines = page.read_text(encoding="utf-8").splitlines()
    names = ["easy", "easy, caches evicted", "impossible", "model"]
    assert found.exit_code == 0
    assert {"date", "machine", "rows", "growth"} == set(written)
    assert names == [each["name"] for each in written["rows"]]
    for each in written["rows"]:
        assert 0 < each["low"] <= each["ratio"] <= each["high"]
        assert each["rounds"] >= measure.MIN_ROUNDS
        assert {"limit": 0.5, "torch.compile": "SomeError"} == each["others"]
    trees = len(growth.OPERATIONS) * len(growth.TREES)
    assert trees + len(growth.AVERAGES) == len(written["growth"])
    for each in written["growth"]:
        assert 2 == len(each["sizes"]) == len(each["modkit"])
        assert len(each["torch"]) == (0 if each["operation"] == growth.SWAP else 2)
    for start in ("| `impossible` |", "| model | 10 ms |", "| `train()` | deep |"):
        assert 1 == sum(line.startswith(start) for line in lines)


@for_each(
    ("ratio", "low", "budget", "expected"),
    [
        (0.4, 0.3, 0.5, "met"),
        (0.5, 0.4, 0.5, "met"),
        (0.6, 0.5, 0.5, "within noise"),
        (0.6, 0.51, 0.5, "missed"),
        (1.04, 1.0, None, "met"),
        (1.07, 1.06, None, "missed"),
    ],
)
def test_a_budget_is_missed_by_more_than_the_noise(ratio, low, budget, expected):
    """A median above the budget counts only if the lower quartile is above it as well."""
    assert expected == measure.verdict(ratio, low, budget)


# Rows that take seconds: torch loads siblings in quadratic time, and the compilers are slow.
SLOW = ("3,000 siblings", "torch.export", "dynamo", "compiled")


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@for_each("each", rows.TIMES, ids=[row.name for row in rows.TIMES])
def test_the_statement_of_a_row_runs_on_both(each, slow):
    """The names that a row makes are those that its statements use."""
    if slow != any(word in each.name for word in SLOW):
        pytest.skip("in the other run")

    with measure.quiet(), ExitStack() as stack:
        arms = each.arms(stack)
        seconds = [arm(1) for arm in arms.values()]

    assert ["torch", "modkit"] == list(arms)[:2]
    assert all(second >= 0 for second in seconds)


@for_each("row", files.ROWS, ids=[row.name for row in files.ROWS])
def test_readers_and_writers_run(row):
    """Each arm reads or writes the file; a missing one is not the base, and not the subject."""
    with measure.quiet(), ExitStack() as stack:
        arms = row.arms(stack, share=0.01)
        seconds = {name: arm(1) for name, arm in arms.items() if not isinstance(arm, str)}

    assert ["torch", "modkit"] == list(seconds)[:2]
    assert all(second > 0 for second in seconds.values())
