import gc
import importlib.util
import json
import os
import stat
import subprocess
import sys

import click.testing
import pytest
import torch

import modkit.nn
from modkit import __main__ as entry
from modkit.cli import _averaging_rows, _bench_report, _bench_rows, _growth, _measure, _row_kinds
from modkit.cli._commands import NAMES, commands


make_parameters = _averaging_rows.parameters


def row(name, budget):
    """Make a row that takes next to no time."""
    return _row_kinds.Time(name, budget, "m.flag = 1", _bench_rows.empty)


def result(budget=0.5, ratio=0.4, low=0.3):
    """Make what came of a row."""
    return _measure.Result("name", budget, ratio, low, 0.9, 1e-6, "s", 5)


@pytest.fixture
def _planted(monkeypatch):
    """Have two rows: one whose budget no run misses, and one whose budget none meets."""
    rows = [row("easy", 1e9), row("impossible", 0.0)]
    monkeypatch.setattr(_bench_rows, "ROWS", rows)


@pytest.fixture
def _small_trees(monkeypatch):
    """Have the growth measured on trees that take next to no time."""
    monkeypatch.setattr("modkit.cli.bench.SIZES", (10, 20))


def invoke(*arguments):
    """Run a command line and return what it printed, and with which status it ended."""
    return click.testing.CliRunner().invoke(commands, arguments)


def bench(*arguments):
    """Run the benchmark as shortly as possible."""
    return invoke("bench", "--seconds", "0.01", *arguments)


@pytest.mark.usefixtures("_planted")
def test_the_table_has_a_line_for_each_row():
    """Each row is printed with its budget and its verdict, and the verdicts are counted."""
    found = bench()

    lines = {line.split("│")[1].strip(): line for line in found.output.splitlines() if "│" in line}
    assert found.exit_code == 0
    assert {"easy", "impossible"} == set(lines)
    assert "met" in lines["easy"]
    assert "missed" in lines["impossible"]
    assert "1 of 2 budgets met, 0 within noise, 1 missed" in found.output
    assert f"torch {torch.__version__.partition('+')[0]}" in found.output


@pytest.mark.usefixtures("_planted")
@pytest.mark.parametrize(("only", "status"), [("easy", 0), ("impossible", 1)])
def test_check_fails_where_a_budget_is_missed(only, status):
    """The exit status of ``--check`` says whether a budget of the chosen rows is missed."""
    assert bench("--check", "--only", only).exit_code == status
    assert bench("--only", only).exit_code == 0


@pytest.mark.usefixtures("_planted")
def test_only_may_be_given_several_times():
    """A row is measured if its name contains one of the words."""
    several = bench("--only", "eas", "--only", "imposs").output

    assert "impossible" not in bench("--only", "eas").output
    assert "easy" in several
    assert "impossible" in several


@pytest.mark.usefixtures("_planted")
def test_a_word_that_no_row_has_is_an_error_that_lists_the_rows():
    """Choosing nothing is a usage error, and names what could be chosen."""
    found = bench("--only", "nonsense")

    assert found.exit_code == 2
    assert "no row contains 'nonsense'" in found.output
    assert "impossible" in found.output


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_a_time_that_is_not_positive_is_refused(seconds):
    """The time for each row must be a positive number."""
    found = invoke("bench", "--seconds", seconds)

    assert found.exit_code == 2
    assert "--seconds" in found.output


@pytest.mark.usefixtures("_planted", "_small_trees")
def test_json_has_everything(tmp_path):
    """The JSON file has the fields of the report, of each row and of each series."""
    path = tmp_path / "new" / "bench.json"
    found = bench("--growth", "--json", str(path))

    report = json.loads(path.read_text(encoding="utf-8"))
    assert found.exit_code == 0
    assert set(_bench_report.Report.__annotations__) == set(report)
    assert set(_bench_report.Machine.__annotations__) == set(report["machine"])
    assert ["easy", "impossible"] == [each["name"] for each in report["rows"]]
    assert ["met", "missed"] == [each["verdict"] for each in report["rows"]]
    for each in report["rows"]:
        assert set(_bench_report.RowReport.__annotations__) == set(each)
        assert 0 < each["low"] <= each["ratio"] <= each["high"]
        assert each["rounds"] >= _measure.MIN_ROUNDS
    assert len(report["growth"]) == len(_growth.OPERATIONS) * len(_growth.TREES)
    for each in report["growth"]:
        assert set(_bench_report.GrowthReport.__annotations__) == set(each)
        assert len(each["sizes"]) == len(each["modkit"]) == len(each["torch"]) == 2
        assert each["operation"] in found.output


@pytest.mark.usefixtures("_planted", "_small_trees")
def test_markdown_has_the_tables(tmp_path):
    """The Markdown file has the table of the ratios and that of the exponents."""
    path = tmp_path / "bench.md"
    bench("--growth", "--markdown", str(path))

    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert sum(line.startswith("| `easy` |") for line in lines) == 1
    assert sum(line.startswith("| `train()` | deep |") for line in lines) == 1
    assert "1 of 2 budgets met, 0 within noise, 1 missed." in lines[0]


def test_a_file_is_replaced_at_once(tmp_path):
    """Where writing fails, the old file is as it was, and no draft stays behind."""
    path = tmp_path / "bench.json"
    _bench_report.write(path, "old")

    with pytest.raises(UnicodeEncodeError):
        _bench_report.write(path, "new \ud800")

    assert path.read_text(encoding="utf-8") == "old"
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_a_file_has_the_usual_permissions(tmp_path):
    """What is written may be read by whoever may read other files of the user."""
    path, other = tmp_path / "bench.json", tmp_path / "other"
    _bench_report.write(path, "text")
    other.touch()

    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


@pytest.mark.parametrize(
    ("ratio", "low", "verdict"),
    [
        (0.4, 0.3, "met"),
        (0.5, 0.4, "met"),
        (0.6, 0.5, "within noise"),
        (0.6, 0.51, "missed"),
    ],
)
def test_a_budget_is_missed_by_more_than_the_noise(ratio, low, verdict):
    """A median above the budget counts only if the lower quartile is above it as well."""
    assert result(0.5, ratio, low).verdict == verdict


@pytest.mark.parametrize(("power", "factor"), [(1, 3.0), (2, 0.1), (0.5, 1.0)])
def test_the_exponent_of_a_power_is_its_power(power, factor):
    """Times that grow with a power of the size have that power as their exponent."""
    sizes = [100, 1000, 10_000]

    assert power == pytest.approx(_measure.exponent(sizes, [factor * n**power for n in sizes]))


def test_torch_is_left_out_where_it_takes_too_long():
    """A size is left out if the trend of the smaller ones promises more time than there is."""
    quadratic = _growth.Series("", "", [100, 1000], [1.0, 1.0], [0.001, 0.1])
    linear = _growth.Series("", "", [100, 1000], [1.0, 1.0], [0.01, 0.1])
    stopped = _growth.Series("", "", [100, 1000], [1.0, 1.0], [0.01])

    assert _growth.too_long(quadratic, 10_000)
    assert not _growth.too_long(linear, 10_000)
    assert _growth.too_long(stopped, 10_000)


@pytest.mark.parametrize("nn", [torch.nn, modkit.nn], ids=["torch", "modkit"])
@pytest.mark.parametrize("tree", list(_growth.TREES))
def test_the_trees_have_about_as_many_modules_as_asked_for(nn, tree):
    """A tree has as many modules as its size says, up to one for each chain, and no data."""
    model = _growth.TREES[tree](nn, 3000)

    assert 2990 <= len(list(model.modules())) <= 3000
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

    difference = _row_kinds.own_bytes(Holder) - _row_kinds.own_bytes(Plain)

    assert difference == sys.getsizeof({})


def test_an_empty_module_takes_no_more_bytes_than_torchs():
    """The row of the memory is met."""
    (memory,) = (each for each in _bench_rows.ROWS if isinstance(each, _row_kinds.Memory))

    assert memory.measure(0.01).verdict == "met"


@pytest.mark.parametrize("each", _bench_rows.TIMES, ids=[r.name for r in _bench_rows.TIMES])
def test_the_statement_of_a_row_runs_on_both(each, impl):
    """The names that a row makes are those that its statement uses."""
    names = each.names(impl.nn)

    with each.context():
        exec(compile(each.statement, each.name, "exec"), names)

    assert isinstance(names.get("m", impl.nn.Module()), impl.nn.Module)


AVERAGING = _averaging_rows.AVERAGING


@pytest.mark.parametrize("each", AVERAGING, ids=[each.name for each in AVERAGING])
def test_a_row_of_an_average_measures_something(each, monkeypatch):
    """Each kind of row names its result, and has a ratio between its quartiles and a base."""
    monkeypatch.setattr(_measure, "SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(_averaging_rows, "parameters", lambda *_: make_parameters([(3,)] * 2))
    found = each.measure(0.001)

    assert found.name == each.name
    assert found.rounds >= _measure.MIN_ROUNDS
    assert 0 < found.low <= found.ratio <= found.high
    assert found.base > 0


def test_measuring_leaves_threads_and_collection_as_they_were():
    """One thread and no garbage collection is for the measurement only."""
    before = torch.get_num_threads(), gc.isenabled()
    with _measure.quiet():
        inside = torch.get_num_threads(), gc.isenabled()

    assert inside == (1, False)
    assert (torch.get_num_threads(), gc.isenabled()) == before


def test_the_help_names_every_command():
    """The help of the group lists the commands, and each has a help of its own."""
    found = invoke("--help")

    assert found.exit_code == 0
    for name in NAMES:
        assert name in found.output
        assert invoke(name, "--help").exit_code == 0
    assert invoke("nonsense").exit_code == 2


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    """Without the extra, the command line says what it needs and how to get it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "click" else find(name)
    )
    with pytest.raises(SystemExit) as ended:
        entry.main()

    assert "needs click, " in ended.value.code
    assert "pip install modkit[cli]" in ended.value.code


def test_the_command_line_runs_as_a_module():
    """``python -m modkit bench`` prints the table in a process of its own."""
    command = [sys.executable, "-m", "modkit", "bench", "--only", "flag", "--seconds", "0.01"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "m.flag = 1" in found.stdout
    assert found.stderr == ""
