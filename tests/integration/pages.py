"""The code that a page of the documentation shows, for tests that ask more of it."""

import re
from pathlib import Path
from typing import Any


DOCS = Path(__file__).parents[2] / "docs"


def run_section(page: str, heading: str) -> dict[str, Any]:
    """Run the Python blocks of one section of a page, and return their names.

    Args:
        page: The name of the file.
        heading: The heading of the section, without its hashes.
    """
    _, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    section, _, _ = rest.partition("\n## ")
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        exec(compile(block, page, "exec"), namespace)
    return namespace
