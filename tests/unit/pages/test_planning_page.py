import runpy
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_tables_for_planning_are_rendered_from_the_formulas():
    """The committed page has them; `python docs/render_planning.py` writes them anew."""
    rendered = runpy.run_path(str(DOCS / "render_planning.py"))["render"]()

    assert rendered == (DOCS / "distributed_planning.md").read_text(encoding="utf-8")
