import json
import runpy
from pathlib import Path

from tests.divergences import DIVERGENCES


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_no_difference_was_left():
    """Each difference of the last run was a row of the table of differences."""
    found = json.loads((DOCS / "lockstep.json").read_text(encoding="utf-8"))

    assert found["differences"] == []
    assert {*found["rows"]} <= {*DIVERGENCES}
    assert found["operations"] == sum(found["kinds"].values())


def test_what_was_found_has_tests():
    """Each difference that a run found names a test that exists."""
    fixed = runpy.run_path(str(DOCS / "render.py"))["render_lockstep"].FIXED
    tests = [test.partition("::") for test in fixed.values()]

    assert [
        name for file, _, name in tests if f"def {name}(" not in (DOCS.parent / file).read_text()
    ] == []
