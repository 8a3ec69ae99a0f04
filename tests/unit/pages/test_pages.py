import re
import runpy
from pathlib import Path

from tests.cases import for_each


ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_render" not in page.parts)
OTHERS = [
    *ROOT.glob("*.md"),
    *(ROOT / "src").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    DOCS / "_render" / "README.md",
]


RENDER = str(DOCS / "render.py")


def test_generated_pages_are_up_to_date():
    """Pages and blocks have the figures of the last runs; `python docs/render.py` writes them."""
    assert runpy.run_path(RENDER)["stale"]() == []


def prose(page):
    """Return a page without its code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and Sphinx make them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]


@for_each("page", [*sorted(OTHERS), *PAGES], ids=lambda page: page.relative_to(ROOT))
def test_links_have_targets(page):
    """The file of each relative link exists, and so does its anchor."""
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    links = [link.partition("#") for link in links if not link.startswith("http")]
    targets = [(page.parent / file if file else page, anchor) for file, _, anchor in links]

    assert [file for file, _ in targets if not file.exists()] == []
    assert [anchor for file, anchor in targets if anchor and anchor not in anchors(file)] == []
