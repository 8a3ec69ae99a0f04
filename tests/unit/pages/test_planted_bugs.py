from pathlib import Path

import pytest

from tests.mutation.planted import BUGS, Bug


ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "modkit"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.mechanism)
def test_a_bug_can_be_planted(bug: Bug):
    """The text that a bug replaces occurs once in its file, and its tests exist."""
    source = (SOURCE / bug.file).read_text(encoding="utf-8")

    assert source.count(bug.old) == 1
    assert bug.old != bug.new
    assert (ROOT / bug.tests).exists()
