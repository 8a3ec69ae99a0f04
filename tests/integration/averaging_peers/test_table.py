import re

import pytest

from tests.integration.averaging_peers.features import FEATURES, outcome
from tests.integration.averaging_peers.peers import PEERS
from tests.integration.pages import DOCS


def cells():
    """Return the feature, the library and the outcome of each cell of the table in docs/peers.md."""
    page = (DOCS / "peers.md").read_text(encoding="utf-8")
    table = re.search(r"^\| feature \|.*\n(?:\|.*\n)+", page, re.MULTILINE)[0]
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    return [(row[0], head[i], row[i]) for row in rows for i in range(1, len(head))]


@pytest.mark.parametrize(
    ("feature", "library", "expected"),
    [pytest.param(*cell, id=f"{cell[0]}, {cell[1]}") for cell in cells()],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_cell(feature, library, expected):
    """A cell of the table says what the library does here; `docs/render_peers.py` writes it anew."""
    try:
        found = outcome(feature, library)
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name or error}")

    assert found == expected


def test_table_is_complete():
    """The table has every feature and every library, in the order in which they are defined."""
    assert [(feature, library) for feature, library, _ in cells()] == [
        (feature, library) for feature in FEATURES for library in PEERS
    ]


def test_each_feature_is_found_somewhere():
    """No row says no everywhere, as it would if its test were wrong."""
    assert {feature for feature, _, found in cells() if found == "yes"} == FEATURES.keys()
