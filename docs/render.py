"""Write every generated page and block from the results of the last runs.

python docs/render.py            # write them
python docs/render.py --check    # exit with 1 and name the pages that are not up to date
"""

import sys
from pathlib import Path


sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import render_bench  # noqa: E402 - found through the line above
import render_compat  # noqa: E402
import render_compatibility  # noqa: E402
import render_curves  # noqa: E402
import render_faults  # noqa: E402
import render_lockstep  # noqa: E402
import render_mutation  # noqa: E402
import render_parity  # noqa: E402
import render_peers  # noqa: E402
import render_planning  # noqa: E402
import render_readme  # noqa: E402
import render_suites  # noqa: E402
from blocks import DOCS, ROOT, replace, wrapped  # noqa: E402


NOTICE = "<!-- Written by docs/render.py from {}. -->"
# The pages that are generated as a whole, from their sections.
PAGES = {
    "compatibility.md": (
        "the json files of this folder",
        (render_compatibility, render_suites, render_compat, render_lockstep),
    ),
    "evidence.md": ("docs/faults.json and docs/mutation.json", (render_faults, render_mutation)),
    "parity.md": ("tests/divergences.py", (render_parity,)),
}
# The blocks of pages that are otherwise written by hand.
BLOCKS = {
    ROOT / "README.md": render_readme,
    DOCS / "averaging.md": render_curves,
    DOCS / "benchmarks.md": render_bench,
    DOCS / "comparison.md": render_peers,
    DOCS / "distributed.md": render_planning,
}


def render() -> dict[Path, str]:
    """Return the text of each page that is generated or has generated blocks."""
    pages = {
        DOCS / name: "\n\n".join([NOTICE.format(source), *(one.section() for one in sections)])
        for name, (source, sections) in PAGES.items()
    }
    pages = {page: f"{wrapped(text).strip()}\n" for page, text in pages.items()}
    for page, module in BLOCKS.items():
        pages[page] = replace(page.read_text(encoding="utf-8"), module.blocks())
    return pages


def stale() -> list[str]:
    """Return the names of the pages that differ from what would be written."""
    return [
        page.name
        for page, text in render().items()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]


def write_pages() -> None:
    """Write the pages; the scripts of the sections call this after a run."""
    for page, text in render().items():
        page.write_text(text, encoding="utf-8")


def main() -> int:
    """Write the pages, or compare them."""
    if "--check" in sys.argv[1:]:
        names = stale()
        sys.stderr.writelines(f"not up to date: {name}\n" for name in names)
        return bool(names)
    write_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
