import pytest

from tests.distributed.launcher import run
from tests.distributed.state.scenarios import SCENARIOS, compare


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Do all of it in two processes."""
    folder = tmp_path_factory.mktemp("dicts")
    return run(2, compare, list(SCENARIOS), folder / "saved", folder=folder, limit=200.0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_states_are_those_of_torch(found, name) -> None:
    """Each process has the same parts, of the same bits, and the same errors and warnings."""
    for by_name in found:
        theirs, ours = by_name[name]["torch"], by_name[name]["modkit"]

        assert "returned" in theirs, theirs["raised"]
        assert "returned" in ours, ours["raised"]
        assert theirs == ours
