"""Write what is generated in README and the documentation; `docs/_render/README.md` lists it.

python docs/render.py                    # pages and blocks, where they are out of date
python docs/render.py --check            # exit with 1 and name what is out of date
python docs/render.py --renew NAME       # first run again what docs/_render/results/NAME.json was measured with
python docs/render.py --record FILE      # first store a run of the tests: what `pytest --junitxml=FILE` wrote
"""

import argparse
import sys
from pathlib import Path


sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from _render import (  # noqa: E402 - found through the line above
    benchmark_tables,
    comparison,
    differences,
    pairs,
    renew,
    tested_with,
)
from _render.markdown import replace, wrapped  # noqa: E402
from _render.stored_results import DOCS  # noqa: E402


NOTICE = "<!-- Written by docs/render.py from {}. -->"
# Pages that are generated as a whole, with their sources.
PAGES = {
    "benchmark_budgets.md": (benchmark_tables, "docs/_render/results"),
    "differences.md": (differences, "tests/divergences.py"),
    "tested_with.md": (tested_with, "docs/_render/results"),
}
# Pages that are written by hand, except for the blocks between two marks.
BLOCKS = {
    DOCS / "benchmarks.md": benchmark_tables,
    DOCS / "comparison.md": comparison,
    DOCS / "test_evidence.md": pairs,
}


def render() -> dict[Path, str]:
    """Return the text of each page that is generated or has generated blocks."""
    pages = {}
    for name, (module, source) in PAGES.items():
        text = wrapped(f"{NOTICE.format(source)}\n\n{module.page()}")
        pages[DOCS / name] = f"{text.strip()}\n"
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
    """Write the pages; the sessions that write results call this after a run."""
    for page, text in render().items():
        page.write_text(text, encoding="utf-8")


def main() -> int:
    """Store new results if they are asked for, and write all, or check it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--renew", choices=sorted(renew.COMMANDS), help="run again, and store")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a run of the tests")
    parser.add_argument("--again", type=Path, nargs="*", default=[], help="of files that ran again")
    parser.add_argument("--device", help="the device of the run that --record stores")
    options = parser.parse_args()

    if options.check:
        names = stale()
        sys.stderr.writelines(f"not up to date: {name}\n" for name in names)
        return bool(names)

    failures = 0
    if options.renew:
        renew.COMMANDS[options.renew]()
    if options.record:
        failures = renew.store_test_run(options.record, options.again, options.device)
    write_pages()
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
