"""Write docs/parity.md from tests/divergences.py: `python docs/render_parity.py`."""

import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
sys.path.insert(0, str(ROOT))

from tests.divergences import DIVERGENCES, Divergence  # noqa: E402 - found through the line above


INTRODUCTION = """\
# Differences from torch

<!-- Rendered from tests/divergences.py by docs/render_parity.py: edit the table there. -->

The behaviour tests run on torch and on modkit, and both must pass. The tests listed here are the
only exceptions: each is expected to fail on one of the two, and it is an error if it stops failing
there. What is not listed is meant to be the same, and a difference is a bug.
"""

SECTIONS = {
    "torch": "## Defects of torch that modkit does not have",
    "modkit": "## What modkit does not do as torch does",
}


def link(upstream: str) -> str:
    """Shorten an address to a link; leave any other text as it is."""
    if not upstream.startswith("https://"):
        return upstream
    return f"[{upstream.rsplit('/', 1)[-1]}]({upstream})"


def line(test: str, row: Divergence) -> str:
    """Render one row of the table."""
    reason = row.reason.replace("|", "\\|")
    return f"| {reason} | {link(row.upstream)} | `{test}` |"


def render() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for side, heading in SECTIONS.items():
        rows = [line(test, row) for test, row in DIVERGENCES.items() if row.fails_on == side]
        table = (
            ["| what and why | upstream | test |", "|---|---|---|", *rows] if rows else ["None."]
        )
        parts.append("\n".join([heading, "", *table, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
