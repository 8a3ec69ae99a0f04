import pytest

from tests.integration.averaging_peers.features import FEATURES, outcome
from tests.integration.averaging_peers.peers import PEERS
from tests.integration.pages import cells, results_of


CELLS = cells(results_of("averaging_libraries"))


@pytest.mark.parametrize(
    ("feature", "library", "expected"),
    [pytest.param(*cell, id=f"{cell[0]}, {cell[1]}") for cell in CELLS],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_cell(feature, library, expected):
    """A cell of the table says what the library does here; `docs/render.py --renew averaging_libraries` renews it."""
    try:
        found = outcome(feature, library)
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name or error}")

    assert found == expected


def test_table_is_complete():
    """The table has every feature and every library, in the order in which they are defined."""
    assert [(feature, library) for feature, library, _ in CELLS] == [
        (feature, library) for feature in FEATURES for library in PEERS
    ]


def test_each_feature_is_found_somewhere():
    """No row says no everywhere, as it would if its test were wrong."""
    assert {feature for feature, _, found in CELLS if found == "yes"} == FEATURES.keys()
