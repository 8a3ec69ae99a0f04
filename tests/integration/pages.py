"""Where the pages of the documentation are, and the cells of the tables of features in docs/comparison.md."""

import json
from pathlib import Path
from typing import Any


DOCS = Path(__file__).parents[2] / "docs"


def results_of(name: str) -> Any:
    """Return stored results that pages of the documentation are rendered from."""
    return json.loads((DOCS / "_render" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def cells(results: Any) -> list[tuple[str, str, str]]:
    """Return the feature, the library and the outcome of each cell of a table."""
    return [
        (feature, library, outcome)
        for feature, outcomes in results["features"].items()
        for library, outcome in zip(results["libraries"], outcomes, strict=True)
    ]
