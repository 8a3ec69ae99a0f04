import os

import pytest

from tests.unit.files.fault_runs import run
from tests.unit.files.faults import FAULTS
from tests.unit.files.writers import OWN


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the faults are those of POSIX")
WRITERS = [writer.name for writer in OWN]


@pytest.fixture(scope="module")
def found():
    """Return what came of a few trials of each fault with each writer, run in one process."""
    return run(WRITERS, random=1, saves=4, elements=300_000)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_file_survives(found, fault, writer):
    """The docstrings in faults.py state what must hold."""
    cell = found[fault][writer]
    if "skipped" in cell:
        pytest.skip(cell["skipped"])

    assert cell["lost"] is None, cell["lost"]
