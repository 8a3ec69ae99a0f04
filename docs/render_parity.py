"""Write docs/parity.md from tests/divergences.py: `python docs/render_parity.py`."""

import re
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
sys.path.insert(0, str(ROOT))

from tests.divergences import ROWS  # noqa: E402 - found through the line above


INTRODUCTION = """\
# Differences from torch

<!-- Rendered from tests/divergences.py by docs/render_parity.py: edit the table there. -->

The behaviour tests run on torch and on modkit, and both must pass. The tests listed here are the
only exceptions: each is expected to fail on one of the two, and it is an error if it stops failing
there. What is not listed is meant to be the same, and a difference is a bug. The cases of `modkit compat`
run both with the installed torch, and require exactly the outcomes that are listed.

What is said of modules holds for classes derived from `modkit.nn.Module`. The layers of `modkit.nn` are
torch's own and do what torch's do. A class such as `class Linear(torch.nn.Linear, modkit.nn.Module)` has
torch's `forward` and, as a module, the behavior listed here.
"""

SECTIONS = {
    "torch": "## Defects of torch that modkit does not have",
    "modkit": "## What modkit does not do as torch does",
    "lightzero": "## Defects of LightZero's networks that those of `modkit.models` do not have",
}


def link(upstream: str) -> str:
    """Shorten the addresses in a text to links."""
    return re.sub(r"https://\S*/(\w+)/(\d+)", r"[\1/\2](\g<0>)", upstream)


def entries(side: str) -> list[str]:
    """Render the differences that make tests fail on one side, each with all of its tests."""
    return [
        f"- {row.reason} ({link(row.upstream)}{f'; torch{row.torch}' if row.torch else ''})\n"
        + "\n".join(
            [f"  - `{test}`" for test in row.tests]
            + [f"  - `modkit compat`, {row.case}"] * bool(row.case)
        )
        for row in ROWS
        if row.fails_on == side
    ]


def render() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for side, heading in SECTIONS.items():
        parts += [heading, "\n".join(entries(side) or ["None."])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
