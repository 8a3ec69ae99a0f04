import runpy
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_pages_show_the_figures_of_the_committed_measurement():
    """README and guide have the figures of bench.json; `python docs/render_bench.py` writes them."""
    rendered = runpy.run_path(str(DOCS / "render_bench.py"))["render"]()

    assert {"README.md", "benchmarks.md"} == {page.name for page in rendered}
    assert {page: page.read_text(encoding="utf-8") for page in rendered} == rendered
