import json
from pathlib import Path

import pytest

from tests.mutation.planted import BUGS, Bug


ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "modkit"
RESULTS = ROOT / "docs" / "_render" / "results" / "planted_bugs.json"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.mechanism)
def test_a_bug_can_be_planted(bug: Bug):
    """The text that a bug replaces occurs once in its file, and its tests exist."""
    source = (SOURCE / bug.file).read_text(encoding="utf-8")

    assert source.count(bug.old) == 1
    assert bug.old != bug.new
    assert (ROOT / bug.tests).exists()


@pytest.mark.parametrize("folder", ["averaging", "files", "jit", "nn"])
def test_each_file_has_a_bug(folder: str):
    """A bug is planted in each file that has code."""
    planted = {bug.file for bug in BUGS}
    files = [path for path in (SOURCE / folder).glob("*.py") if "def " in path.read_text("utf-8")]

    assert {f"{folder}/{path.name}" for path in files} <= planted


def test_every_planted_bug_was_caught():
    """The committed run has all bugs, and a test for each."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["planted"]
    caught = {row["mechanism"]: row["caught by"] for row in found["bugs"]}

    assert list(caught) == [bug.mechanism for bug in BUGS]
    assert "" not in caught.values()
