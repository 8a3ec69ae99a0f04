import json
import runpy
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_is_rendered_from_the_last_runs():
    """The committed page has them; `python docs/render_compatibility.py` writes it anew."""
    rendered = runpy.run_path(str(DOCS / "render_compatibility.py"))["render"]()

    assert rendered == (DOCS / "compatibility.md").read_text(encoding="utf-8")


def test_no_test_failed():
    """No run that is committed had a failing test."""
    runs = json.loads((DOCS / "compatibility.json").read_text(encoding="utf-8"))["tests"]

    assert [run for run in runs if run["failed"]] == []
