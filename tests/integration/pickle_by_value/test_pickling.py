import importlib
import pickle
from typing import Any, Final

import cloudpickle
import dill
import pytest

from tests.cases import for_each
from tests.helpers import TORCH, Implementation, same
from tests.integration.pickle_by_value.notebook import run_cells
from tests.processes import python


PICKLERS: Final = {"cloudpickle": cloudpickle, "dill": dill}
# dill cannot write a TypeVar that it cannot import.
CASES: Final = sorted(
    {(name, case) for name in PICKLERS for case in run_cells(TORCH).CASES} - {("dill", "generic")}
)
VIEWS: Final = ("modkit.nn", "modkit.nn.modules", "modkit.nn.modules.module", "modkit.jit")

# Prints how each network is described where its class is unknown.
READER: Final = """
import pickle, sys
from torch import manual_seed

for library, payload in pickle.load(sys.stdin.buffer):
    describe, made = __import__(library).loads(payload)
    print(describe(made))
"""


@pytest.fixture(autouse=True)
def _what_functions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dill write what a function reads, instead of its whole namespace."""
    monkeypatch.setitem(dill.settings, "recurse", True)


@for_each("library, case", CASES)
def test_classes_are_pickled_by_value(library: str, case: str) -> None:
    """Classes of a notebook are copied, and the copy behaves as the original."""

    def scenario(impl: Implementation) -> Any:
        notebook = run_cells(impl)
        payload = PICKLERS[library].dumps((notebook.describe, notebook.CASES[case]))
        describe, copied = PICKLERS[library].loads(payload)
        described = describe(copied)
        assert described == notebook.describe(notebook.CASES[case])
        return described

    assert same(scenario)[0] == "returned"


def test_another_process_gets_the_classes(impl: Implementation) -> None:
    """A process that has none of the classes reads the pickles, and describes the same."""
    notebook = run_cells(impl)
    payloads = [
        (library, PICKLERS[library].dumps((notebook.describe, notebook.CASES[case])))
        for library, case in CASES
    ]
    expected = [str(notebook.describe(notebook.CASES[case])) for _, case in CASES]
    result = python(READER, stdin=pickle.dumps(payloads))

    assert result.stderr == ""
    assert result.stdout.splitlines() == expected


def test_pickling_leaves_a_class_as_it_was() -> None:
    """No class gets an attribute by being pickled, and no two share a registry."""
    notebook = run_cells(Implementation("modkit"))
    before = [dict(vars(cls)) for cls in (notebook.Plain, notebook.Derived)]
    cloudpickle.dumps(notebook.Derived())
    dill.dumps(notebook.Derived())

    assert [dict(vars(cls)) for cls in (notebook.Plain, notebook.Derived)] == before
    assert notebook.Plain._abc_impl is not notebook.Derived._abc_impl


@for_each("name", VIEWS)
def test_namespaces_are_pickled_by_reference(name: str) -> None:
    """Every module that shows one of torch's is imported where it is unpickled."""
    namespace = importlib.import_module(name)

    for dumps in (pickle.dumps, cloudpickle.dumps, dill.dumps):
        assert pickle.loads(dumps(namespace)) is namespace
        assert len(dumps(namespace)) < 200
