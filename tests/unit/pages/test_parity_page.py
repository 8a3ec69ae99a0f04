import runpy
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_of_differences_is_rendered_from_the_table():
    """The committed page is what the table says; `python docs/render_parity.py` writes it anew."""
    rendered = runpy.run_path(str(DOCS / "render_parity.py"))["render"]()

    assert rendered == (DOCS / "parity.md").read_text(encoding="utf-8")
