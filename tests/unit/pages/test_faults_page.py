import json
import runpy
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_table_of_faults_is_rendered_from_the_last_run():
    """The committed page has it; `python docs/render_faults.py` writes it anew."""
    rendered = runpy.run_path(str(DOCS / "render_faults.py"))["render"]()

    assert rendered == (DOCS / "faults.md").read_text(encoding="utf-8")


def test_no_file_was_lost():
    """Every trial of the committed run left a complete file."""
    rows = json.loads((DOCS / "faults.json").read_text(encoding="utf-8"))["faults"]
    cells = [cell for row in rows.values() for cell in row["cells"].values()]

    assert [cell["lost"] for cell in cells if "skipped" not in cell and cell["lost"]] == []
