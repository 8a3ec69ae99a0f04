"""Where the pages of the documentation are."""

from pathlib import Path


DOCS = Path(__file__).parents[2] / "docs"
