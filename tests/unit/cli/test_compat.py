"""The command ``compat``: the shared behaviours, and a user's model."""

import functools
import json
import multiprocessing
import os
import sys
import types
from pathlib import Path

import pytest
from torch import nn

from modkit.compat import run as runner
from modkit.compat.behaviours import areas
from modkit.compat.behaviours.differences import DIFFERENCES, Difference
from modkit.compat.model import Target, TargetError, build, compare, inputs_of, packages_of
from modkit.compat.outcomes import difference, outcome
from modkit.compat.swapped_imports import SwappedImports
from modkit.nn import Module
from tests.unit.cli.command_line import invoke


run = functools.partial(invoke, "compat")
SCRIPT = """
import torch
from torch import nn

print("a line of the user's code")


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Linear(3, width)

    def forward(self, x):
        return self.body(x).relu()


class Different(Net):
    def forward(self, x):
        return super().forward(x) * len(type(self).__mro__)


def raises():
    raise ValueError("of the user\\nin two lines")


def inputs():
    return {"x": torch.ones(5, 3)}


def number():
    return 1


constant = 1
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a script with models, and forget after the test that it was imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "user_script", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "user_script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    yield path
    sys.modules.pop("user_script", None)


def test_behaviours_of_an_area() -> None:
    """The JSON and the table have the counts; the table has no listed differences."""
    found = run("--area", "conversion", "--json")
    report = json.loads(found.stdout)
    table = run("--area", "conversion").stdout

    cases = len(areas()["conversion"])
    assert (found.exit_code, report["areas"]["conversion"]["cases"]) == (0, cases)
    assert report["areas"]["all"]["unlisted"] == 0
    assert DIFFERENCES["conversion: channels_last with volumes"].reason in found.stdout
    assert f" {cases} " in table
    assert "Listed differences" not in table


def test_an_unlisted_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 1, and the report shows what each library does."""
    monkeypatch.setattr(runner, "areas", lambda: {"members": {"a name": lambda lib: [1, lib.name]}})
    found = run("--area", "members", "--json")

    assert found.exit_code == 1
    (result,) = json.loads(found.stdout)["results"]
    assert (result["kind"], result["torch"]) == ("unlisted", "returns [1, 'torch']")
    assert "/1/1 " in run("--area", "members").output


@pytest.mark.parametrize("given", [("torch", "torch"), (1, "modkit"), ("torch", 1)], ids=str)
def test_a_listed_difference_is_exact(monkeypatch: pytest.MonkeyPatch, given: tuple) -> None:
    """A listed difference that is gone, or that is another one, is not as listed."""
    listed = Difference("why", lambda lib: lib.name, *given)
    exact = Difference("why", lambda lib: lib.name, "torch", "modkit")
    monkeypatch.setattr(runner, "DIFFERENCES", {"members: a": listed, "members: b": exact})

    assert runner.run_case("members", "a", listed.case).kind == "unlisted"
    assert runner.run_case("members", "b", exact.case).kind == "listed"


def test_where_two_outcomes_differ() -> None:
    """The first place is named, also of a key or a warning that only one has."""
    one, other = outcome(lambda: {"a": [1, 2], "b": 3}), outcome(lambda: {"a": [1, 5], "b": 3})

    assert difference(one, other) == ("/1/a/1", 2, 5)
    assert difference({"a": 1}, {"b": 1}) == (" keys/0", "a", "b")
    assert difference(one, one) is None


@pytest.mark.usefixtures("forked_models")
def test_a_model_that_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of a model is in the table; the title names classes that were not swapped."""
    (tmp_path / "heads.py").write_text("import torch\n\nclass Head(torch.nn.Linear):\n    pass\n")
    (tmp_path / "whole.py").write_text(
        "from torch import nn\nfrom heads import Head\n\n"
        "class Whole(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = Head(3, 2)\n\n"
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = run("whole.py:Whole")

    assert found.exit_code == 0
    made = "called with float32 (2, 3), made for its first layers"
    for text in (
        "2 modules, 1 of modkit's Module; 1 of 2 classes outside of torch",
        "still torch's: heads.Head",
        made,
        "torch.export",
        "loading the state dict",
    ):
        assert text in " ".join(found.output.split())
    assert "differs" not in found.output
    assert found.stderr.splitlines()[1:3] == ["  structure", "  text"]


@pytest.mark.usefixtures("forked_models")
def test_torch_itself_is_not_rewritten() -> None:
    """A layer of torch is modkit's too, so nothing is swapped; a line says what is done."""
    swapped = SwappedImports(packages_of(Target("torch.nn:Identity")))
    found = run("torch.nn:Identity", "--input", "3,4", "--json")

    report = json.loads(found.stdout)
    assert (found.exit_code, report["areas"]["all"]["equal"]) == (0, 12)
    assert "1 modules, 0 of modkit's Module" in report["title"]
    first, *steps = found.stderr.splitlines()
    assert first == "building torch.nn:Identity on torch and on modkit, and comparing"
    assert steps[:2] == ["  structure", "  text"]
    # It took 11 seconds of CPU time when it was rewritten.
    assert not swapped.rewrites("torch.nn.modules.linear", nn.modules.linear.__file__)


@pytest.mark.usefixtures("forked_models")
def test_a_model_that_differs(script: Path) -> None:
    """The differing checks are named, and the exit status is 1."""
    found = run(f"{script}:Different", "--input", f"{script}:inputs", "--json")

    report = json.loads(found.stdout)
    kinds = {each["case"]: each["kind"] for each in report["results"]}
    assert found.exit_code == 1
    assert report["title"].endswith("called with x=float32 (5, 3)")
    assert (kinds["output in evaluation mode"], kinds["state dict"]) == ("unlisted", "equal")


@pytest.mark.usefixtures("forked_models")
def test_an_input_that_does_not_fit(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where both sides raise, nothing was compared: the report says so, without frames, and the exit status is 1."""
    found = run(f"{script}:Net", "--input", "2,5", "--json")

    report = json.loads(found.stdout)
    kinds = {each["case"]: each["kind"] for each in report["results"]}
    assert found.exit_code == 1
    assert report["title"].endswith("called with float32 (2, 5)")
    assert (kinds["output in evaluation mode"], kinds["pickle"]) == ("not compared", "equal")
    assert report["areas"]["all"]["not compared"] == 5
    assert "Traceback" not in capfd.readouterr().err


CHANCE = """
import dataclasses
import random
import numpy
import torch
from torch import nn

@dataclasses.dataclass
class Output:
    indices: torch.Tensor
    missing: object = dataclasses.field(init=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name in {"alpha", "beta", "gamma", "delta"}:
            self.add_module(name, nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.tensor(random.random() + numpy.random.rand()))

    def forward(self, x):
        drawn = random.random() + numpy.random.rand()
        return Output((self.alpha(x) * self.scale + drawn).argmax(-1))


class NoShape(nn.Module):
    def forward(self, x):
        return x
"""


@pytest.mark.usefixtures("forked_models")
@pytest.mark.parametrize(("name", "kind"), [("Net", "equal"), ("NoShape", "not compared")])
def test_what_a_model_draws_and_returns(tmp_path: Path, name: str, kind: str) -> None:
    """Each generator is seeded, indices have no gradients, and without an input nothing is compared."""
    script = tmp_path / "chance.py"
    script.write_text(CHANCE, encoding="utf-8")
    found = run(f"{script}:{name}", "--json")

    kinds = {each["case"]: each["kind"] for each in json.loads(found.stdout)["results"]}
    assert found.exit_code == (kind != "equal")
    assert kinds["output in evaluation mode"] == kind
    assert kinds["output, gradients and buffers in training mode"] == kind
    assert kinds["structure"] == "equal"


def test_sets_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes start with one seed for the hashes of strings; this process keeps its own."""
    seeds: list[str | None] = []

    def pipe() -> None:
        seeds.append(os.environ.get("PYTHONHASHSEED"))
        raise KeyboardInterrupt

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    contexts = types.SimpleNamespace(Pipe=pipe)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: contexts)
    with pytest.raises(KeyboardInterrupt):
        compare(Target("a:b"))

    assert seeds == ["0"]
    assert "PYTHONHASHSEED" not in os.environ


@pytest.mark.usefixtures("forked_models")
def test_a_model_on_modkit(tmp_path: Path) -> None:
    """It would be compared with itself."""
    script = tmp_path / "migrated.py"
    script.write_text(SCRIPT.replace("from torch import nn", "from modkit import nn"), "utf-8")
    found = run(f"{script}:Net")

    assert found.exit_code == 2
    assert "migrated.py:Net uses modkit already, and would be compared with itself" in found.stderr


@pytest.mark.parametrize(
    "inputs", [["{script}:inputs", "{script}:inputs"], ["2,3", "{script}:inputs"]]
)
def test_several_inputs_of_functions(script: Path, inputs: list[str]) -> None:
    """One function returns all inputs: a second one was ignored."""
    target = Target("a:b", inputs=[each.format(script=script) for each in inputs])
    with pytest.raises(
        TargetError, match="several shapes, or one function that returns all inputs"
    ):
        inputs_of(target, nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("check", "kind", "expected"),
    [
        ("output in evaluation mode", "equal", False),
        ("output in evaluation mode", "unlisted", True),
        ("output in evaluation mode", "not compared", True),
        ("torch.fx.symbolic_trace", "not compared", False),
        ("torch.export", "unlisted", True),
    ],
)
def test_what_fails(check: str, kind: str, expected: bool) -> None:
    """Torch alone refuses to trace some models; a model that cannot be called compares nothing."""
    found = runner.Result("model", check, kind, ("raises", "E", "", []), ("raises", "E", "", []))

    assert runner.Report("model", [found], by_area=False).failed() is expected


@pytest.mark.usefixtures("forked_models")
def test_a_swapped_package_that_uses_nothing_of_torch(script: Path) -> None:
    """A misspelled package is an error of the command line: it would be compared with itself."""
    found = run(f"{script}:Net", "--swap", "user_scripts")

    assert found.exit_code == 2
    assert "Error: --swap user_scripts: none of its modules was imported" in found.stderr


@pytest.mark.usefixtures("forked_models")
def test_a_model_that_raises(script: Path) -> None:
    """The error of the user's code is one line, and no traceback."""
    found = run(f"{script}:raises")

    expected = "the model cannot be built on torch: ValueError: of the user\\nin two lines"
    doing = f"building {script}:raises on torch and on modkit, and comparing"
    assert (found.exit_code, found.stderr) == (1, f"{doing}\nError: {expected}\n")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "'nothing' is neither package.module:Class nor path/to/script.py:factory"),
        ("no_such_package.module:Net", "there is no module no_such_package"),
        ("json.no_such_module:Net", "there is no module json.no_such_module"),
        ("json:Net", "json has no Net"),
        ("json:JSONDecoderr", "json has no JSONDecoderr"),
        ("missing.py:make", "there is no file missing.py"),
        ("{script}:factory", "user_script has no factory"),
        ("{script}:constant", "{script}:constant is not callable"),
        ("{script}:number", "{script}:number returns a int, which is not a module"),
    ],
)
def test_targets_that_cannot_be_used(script: Path, target: str, message: str) -> None:
    """The error names the part of the target that is wrong."""
    with pytest.raises(TargetError) as caught:
        build(Target(target.format(script=script)))

    assert str(caught.value) == message.format(script=script)


def test_only_the_swapped_package_is_rewritten(script: Path) -> None:
    """Classes of the package derive from modkit's Module; its lines keep their numbers."""
    target = Target(f"{script}:Net", inputs=["2,3"])
    remove = SwappedImports(packages_of(target)).install()
    try:
        net = build(target)
    finally:
        remove()

    line = SCRIPT[: SCRIPT.index("def forward")].count("\n") + 1
    assert Module in type(net).__mro__
    assert type(net).forward.__code__.co_firstlineno == line
    assert inputs_of(target, net)[0][0].shape == (2, 3)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        ("Linear(3, 1)", (2, 3)),
        ("Conv2d(3, 1, 1)", (2, 3, 32, 32)),
        ("Embedding(5, 1)", (2, 8)),
        ("LSTM(3, 1)", (2, 3)),
        ("Flatten()", None),
    ],
)
def test_guessed_inputs(layer: str, shape: tuple[int, ...] | None) -> None:
    """The first layer that has a size gives the shape of the input; else there is none."""
    found = inputs_of(Target("a:b"), nn.Sequential(eval(f"nn.{layer}")))

    assert (found and found[0][0].shape) == shape
