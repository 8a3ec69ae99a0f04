import runpy
from pathlib import Path

from modkit.compat.behaviours.differences import DIFFERENCES

from tests.divergences import ROWS


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_of_differences_is_rendered_from_the_table():
    """The committed page is what the table says; `python docs/render_parity.py` writes it anew."""
    rendered = runpy.run_path(str(DOCS / "render_parity.py"))["render"]()

    assert rendered == (DOCS / "parity.md").read_text(encoding="utf-8")


def test_the_behaviours_with_a_listed_difference_are_rows_of_the_table():
    """What `modkit compat` counts as listed is in the one table of differences, once."""
    assert sorted(row.case for row in ROWS if row.case) == sorted(DIFFERENCES)
