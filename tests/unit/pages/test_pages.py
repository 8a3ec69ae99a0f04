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
NOTICE = "<!-- Written by docs/render.py"


def test_generated_pages_are_up_to_date():
    """Pages and blocks have the figures of the last runs; `python docs/render.py` writes them."""
    assert runpy.run_path(RENDER)["stale"]() == []


def test_pictures_are_up_to_date():
    """Figures show the committed data, and those of the terminal what the commands print."""
    assert runpy.run_path(RENDER)["stale_pictures"]() == []


def test_readme_of_the_generators_lists_what_is_generated():
    """A page is generated, or has a generated block, if and only if the list has it."""
    text = (DOCS / "_render" / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `docs/(\w+\.md)` \| (whole page)?", text, re.MULTILINE))
    whole = [page.name for page in PAGES if page.read_text("utf-8").startswith(NOTICE)]
    partly = [page.name for page in PAGES if "written by docs/render.py -->" in page.read_text()]

    assert sorted(name for name, how_much in listed.items() if how_much) == sorted(whole)
    assert sorted(name for name, how_much in listed.items() if not how_much) == sorted(partly)


def test_readme_begins_with_what_a_newcomer_needs():
    """A picture and three reasons, the installation, the average; the import of modkit.nn is last."""
    first_screen = README.partition("\n## ")[0]
    headings = re.findall(r"^## (.*)", README, re.MULTILINE)

    assert re.findall(r"^!\[.+\]\(docs/_static/\w+\.svg\)$", first_screen, re.MULTILINE)
    assert re.findall(r"^(\d)\. \*\*", first_screen, re.MULTILINE) == ["1", "2", "3"]
    assert headings[:2] == ["Install", "Average the weights"]
    assert README.index("modkit.EMA(") < README.index("import modkit.nn as nn")


def prose(page):
    """Return a page without its code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and Sphinx make them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]


def test_links_of_the_readme_are_relative():
    """Every link works in a checkout: the project has no site and no repository of its own yet."""
    links = re.findall(r"\]\(([^)]*)\)", README)

    assert links
    assert [link for link in links if ":" in link] == []


@for_each("page", [*sorted(OTHERS), *PAGES], ids=lambda page: page.relative_to(ROOT))
def test_links_have_targets(page):
    """The file of each relative link exists, and so does its anchor."""
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    links = [link.partition("#") for link in links if not link.startswith("http")]
    targets = [(page.parent / file if file else page, anchor) for file, _, anchor in links]

    assert [file for file, _ in targets if not file.exists()] == []
    assert [anchor for file, anchor in targets if anchor and anchor not in anchors(file)] == []


@for_each("page", PAGES, ids=lambda page: page.stem)
def test_prose_is_wrapped(page):
    """Lines of prose and code have at most 120 characters."""
    lines = page.read_text(encoding="utf-8").splitlines()
    free = ("|", "<", "!", "#", ":")

    assert [
        line
        for line in lines
        if len(line) > 120 and not line.lstrip().startswith(free) and " " in line[60:]
    ] == []
