"""The tables of features in docs/comparison.md: each cell is run where its library is installed."""

import pytest

from tests.integration.averaging_peers import features as averages
from tests.integration.averaging_peers.peers import PEERS as AVERAGING_PEERS
from tests.integration.pages import cells, results_of
from tests.integration.state_dict_peers import features as state_dicts
from tests.integration.state_dict_peers.peers import PEERS as STATE_DICT_PEERS


# The features and the libraries of each table, by the name of its stored results.
TABLES = {
    "averaging_libraries": (averages, AVERAGING_PEERS),
    "state_dict_libraries": (state_dicts, STATE_DICT_PEERS),
}
CELLS = {table: cells(results_of(table)) for table in TABLES}


@pytest.mark.parametrize(
    ("table", "feature", "library", "expected"),
    [
        pytest.param(table, *cell, id=f"{cell[0]}, {cell[1]}")
        for table, table_cells in CELLS.items()
        for cell in table_cells
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_cell(table, feature, library, expected):
    """A cell says what the library does here; `docs/render.py --renew TABLE` renews a table."""
    features, _ = TABLES[table]
    try:
        found = features.outcome(feature, library)
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name or error}")

    assert found == expected


@pytest.mark.parametrize("table", TABLES)
def test_table_is_complete(table):
    """A table has every feature and every library, in the order in which they are defined."""
    features, peers = TABLES[table]

    assert [(feature, library) for feature, library, _ in CELLS[table]] == [
        (feature, library) for feature in features.FEATURES for library in peers
    ]


@pytest.mark.parametrize("table", TABLES)
def test_each_feature_is_found_somewhere(table):
    """No row says no everywhere, as it would if its test were wrong."""
    features, _ = TABLES[table]

    found = {feature for feature, _, answer in CELLS[table] if answer == "yes"}
    assert found == features.FEATURES.keys()
