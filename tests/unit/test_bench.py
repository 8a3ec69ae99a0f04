"""The harness of the benchmarks. No test asserts how long something takes."""

import gc
import json
import sys
from contextlib import ExitStack

import click.testing
import pytest
import torch

import modkit.nn
from benchmarks import (
    __main__ as command,
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
    monkeypatch.setattr(growth, "SIZES", (10, 20))


@pytest.fixture
def _shortest(monkeypatch):
    """Have samples and models as small as possible."""
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 1e-6)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-6)
    parameters, gpt2 = rows.parameters, rows.gpt2
    monkeypatch.setattr(rows, "parameters", lambda _: parameters([(3,)] * 2))
    monkeypatch.setattr(rows, "gpt2", lambda _, dtype: gpt2(96, dtype))


def bench(*arguments):
    """Run the benchmark as shortly as possible."""
    return click.testing.CliRunner().invoke(command.main, ["--seconds", "0.001", *arguments])


@pytest.mark.usefixtures("_planted")
def test_a_table_has_a_line_for_each_row():
    """Each row is printed with its budget and verdict, those with evicted caches too."""
    found = bench("--no-growth")

    assert found.exit_code == 0
    assert "2 of 4 budgets met, 0 within noise, 2 missed" in found.output
    assert "| `easy` | 10 ms | 2.00 (2.00 to 2.00) | 3.00 | met | 0.50 |" in found.output
    assert "| `easy, caches evicted` | 10 ms | 2.00 (2.00 to 2.00) | 4.00 |" in found.output
    assert "| 2.00 (2.00 to 2.00) | \N{EN DASH} | missed |  |  | SomeError | 0.50 |" in found.output
    assert f"torch {torch.__version__.partition('+')[0]}" in found.output


@pytest.mark.usefixtures("_planted")
def test_check_fails_where_a_budget_is_missed():
    """The exit status of ``--check`` is 1 if a budget of the chosen rows is missed."""
    assert bench("--check", "--only", "eas").exit_code == 0
    assert bench("--check", "--only", "eas", "--only", "impossible").exit_code == 1
    assert bench("--only", "impossible").exit_code == 0


@pytest.mark.usefixtures("_planted")
@for_each(
    ("arguments", "words"),
    [
        (["--only", "nonsense"], ["no row contains 'nonsense'", "impossible"]),
        *((["--seconds", seconds], ["--seconds"]) for seconds in ("0", "soon")),
    ],
)
def test_wrong_options_are_usage_errors(arguments, words):
    """A word that no row has lists the rows, and the time for each row is a positive number."""
    found = bench(*arguments)

    assert found.exit_code == 2
    assert all(word in found.output for word in words)


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
    assert len(growth.OPERATIONS) * len(growth.TREES) == len(written["growth"])
    for each in written["growth"]:
        assert 2 == len(each["sizes"]) == len(each["modkit"]) == len(each["torch"])
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


@pytest.mark.parametrize(("power", "factor"), [(1, 3.0), (2, 0.1), (0.5, 1.0)])
def test_the_exponent_of_a_power_is_its_power(power, factor):
    """Times that grow with a power of the size have that power as their exponent."""
    sizes = [100, 1000, 10_000]

    assert power == pytest.approx(growth.exponent(sizes, [factor * n**power for n in sizes]))
    assert growth.exponent(sizes, [1.0]) is None


@for_each("nn", [torch.nn, modkit.nn], ids=["torch", "modkit"])
@for_each("tree", list(growth.TREES))
def test_the_trees_have_about_as_many_modules_as_asked_for(nn, tree):
    """A tree has as many modules as its size says, up to one for each chain, and no data."""
    model = growth.TREES[tree](nn, 300)

    assert 290 <= len(list(model.modules())) <= 300
    assert all(p.is_meta for p in model.parameters())


def test_an_object_is_measured_with_what_only_it_refers_to():
    """A table of each object counts, a string that all objects of the class refer to does not."""

    class Plain:
        def __init__(self):
            self.name = "shared" * 100

    class Holder(Plain):
        def __init__(self):
            super().__init__()
            self.name = {}

    difference = rows.own_bytes(Holder) - rows.own_bytes(Plain)

    assert sys.getsizeof({}) == difference


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


OTHERS = [
    row for row in rows.OPERATIONS[len(rows.TIMES) :] if not row.name.startswith("import modkit")
]


@pytest.mark.slow
@pytest.mark.usefixtures("_shortest")
@for_each("each", OTHERS, ids=[row.name for row in OTHERS])
def test_a_row_without_torch_measures_something(each):
    """Each row names its result, and has a ratio between its quartiles and a base."""
    found, *_ = measure.measure(each, 0.001)

    assert each.name == found["name"]
    assert found["rounds"] >= measure.MIN_ROUNDS
    assert 0 <= found["low"] <= found["ratio"] <= found["high"]
    assert found["base"] > 0


@for_each("row", files.ROWS, ids=[row.name for row in files.ROWS])
def test_readers_and_writers_run(row):
    """Each arm reads or writes the file; a missing one is not the base, and not the subject."""
    with measure.quiet(), ExitStack() as stack:
        arms = row.arms(stack, share=0.01)
        seconds = {name: arm(1) for name, arm in arms.items() if not isinstance(arm, str)}

    assert ["torch", "modkit"] == list(seconds)[:2]
    assert all(second > 0 for second in seconds.values())


SMALL = [
    row
    for row in workloads.rows(with_compile=False)
    if row.table == "inference" and "GPT-2" not in row.name
]


@pytest.mark.slow
@for_each("each", SMALL, ids=[row.name for row in SMALL])
def test_the_contestants_of_a_model_agree(each):
    """Making the arms compares their outputs, and none of TorchScript and the limit is missing."""
    with measure.quiet(), ExitStack() as stack:
        arms = each.arms(stack)
        seconds = [arm(1) for arm in arms.values()]

    assert ["torch", "fast_inference", "modkit"] == list(arms)[:3]
    assert all(second >= 0 for second in seconds)


def test_a_script_is_imported_from_its_checkout_for_each_side(tmp_path):
    """The arms take the same steps, on torch and on modkit, and leave no module behind."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    source = "from torch import nn\nclass Net(nn.Module):\n    forward = lambda self, x: x + 1\n"
    (folder / "a_script.py").write_text(source, encoding="utf-8")
    models = []

    def make(script):
        models.append(script.Net())
        return models[-1], lambda: models[-1](torch.ones(2))

    script = scripts.Script("row", "owner/name", ".", "a_script", make)
    before = list(sys.path), list(sys.meta_path), set(sys.modules)
    with measure.quiet(), ExitStack() as stack:
        arms = scripts.steps(stack, script, tmp_path)
        assert all(arm(1) > 0 for arm in arms.values())

    assert list(arms) == ["torch", "fast_inference", "modkit"]
    assert [modkit.nn.Module in type(model).__mro__ for model in models] == [False, True, True]
    assert (list(sys.path), list(sys.meta_path), set(sys.modules)) == before


def test_models_for_dynamo_are_of_each_library():
    """Each makes the same graph from modules of torch and of modkit; checkouts are an option."""
    for nn in (torch.nn, modkit.nn):
        names = scripts.model_for_dynamo(nn, scripts.recurrent, compiled=True)
        assert names["m"](*names["inputs"]).shape == (1, 64)

    assert not [row.name for row in scripts.rows(None) if row.table == "scripts"]


def test_a_wrong_output_stops_the_measurement(monkeypatch):
    """Contestants whose outputs differ are not timed."""
    monkeypatch.setattr(workloads, "frozen", lambda model, inputs: lambda x: model(x) + 1)
    row = workloads.rows(with_compile=False)[0]

    with measure.quiet(), ExitStack() as stack, pytest.raises(AssertionError, match="not close"):
        row.arms(stack)


def test_all_arms_are_timed_as_often():
    """Each round has one time of each arm, with warm and with evicted caches."""
    arms = {"a": lambda n: 0.01 * n, "b": lambda n: 0.02 * n}

    for cold in (False, True):
        found = measure.interleaved(arms, 0, cold=cold, rounds=(3, 3))

        assert [pytest.approx(0.01)] * 3 == found["a"]
        assert [pytest.approx(0.02)] * 3 == found["b"]


def test_measuring_leaves_threads_and_collection_as_they_were():
    """One thread and no garbage collection is for the measurement only."""
    before = torch.get_num_threads(), gc.isenabled()
    with measure.quiet():
        inside = torch.get_num_threads(), gc.isenabled()

    assert (1, False) == inside
    assert before == (torch.get_num_threads(), gc.isenabled())
