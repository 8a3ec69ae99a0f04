from modkit.compat.behaviours.differences import DIFFERENCES
from tests.divergences import ROWS


def test_the_behaviours_with_a_listed_difference_are_rows_of_the_table():
    """Each case that `modkit compat` counts as listed is one row of the table of differences."""
    assert sorted(row.case for row in ROWS if row.case) == sorted(DIFFERENCES)
