import os

import pytest

from tests.unit.files.fault_runs import run
from tests.unit.files.faults import FAULTS
from tests.unit.files.writers import installed


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the faults are those of POSIX")
PACKAGES = {"lightning": ["lightning"], "transformers": ["transformers", "accelerate"]}


@pytest.fixture(scope="module", params=PACKAGES)
def writer(request):
    """Return the name of a writer whose packages are there."""
    for package in PACKAGES[request.param]:
        if not installed(package):
            pytest.skip(f"needs {package}: nox -s ecosystem installs it")
    return request.param


@pytest.fixture(scope="module")
def found(writer):
    """Return what came of a few trials of each fault."""
    return {fault: cells[writer] for fault, cells in run([writer], random=1, saves=5).items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_file_survives(found, fault):
    """The docstrings in faults.py say what has to hold."""
    if "skipped" in found[fault]:
        pytest.skip(found[fault]["skipped"])

    assert found[fault]["lost"] is None, found[fault]["lost"]


@pytest.mark.slow
def test_file_survives_many_kills(writer):
    """Fifty kills at random moments."""
    cell = run([writer], ["killed"], random=50)["killed"][writer]

    assert cell["lost"] is None, cell["lost"]
    assert cell["notes"]["left a temporary file"] > 0
