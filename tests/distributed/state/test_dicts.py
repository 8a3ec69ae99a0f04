import pytest

from tests.distributed.launcher import run
from tests.distributed.state.scenarios import SCENARIOS, compare


SHORT = [
    "one_process_gives_all_the_state",
    "parts_are_put_in_place",
    "memory_comes_late",
    "old_versions_are_migrated",
]
LONG = [name for name in SCENARIOS if name not in SHORT]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Do some of it in two processes."""
    folder = tmp_path_factory.mktemp("short")
    return run(2, compare, SHORT, folder / "saved", folder=folder, limit=200.0)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Do the rest."""
    folder = tmp_path_factory.mktemp("long")
    return run(2, compare, LONG, folder / "saved", folder=folder, limit=200.0)


def assert_same(found, name) -> None:
    """Assert that each rank has bitwise identical shards, and equal errors and warnings."""
    for by_name in found:
        theirs, ours = by_name[name]["torch"], by_name[name]["modkit"]

        assert "returned" in theirs, theirs["raised"]
        assert "returned" in ours, ours["raised"]
        assert theirs == ours


@pytest.mark.parametrize("name", SHORT)
def test_states_are_put_in_place_as_in_torch(short, name) -> None:
    """Sharded networks, on the meta device or of old versions, load bitwise identically."""
    assert_same(short, name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LONG)
def test_states_are_those_of_torch(long, name) -> None:
    """Returned, replaced and refused entries are bitwise identical."""
    assert_same(long, name)
