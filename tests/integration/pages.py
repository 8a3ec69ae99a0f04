"""Stored results of the pages of the documentation, and the cells of the tables of features in docs/comparison.md."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


DOCS = Path(__file__).parents[2] / "docs"


def results_of(name: str) -> Any:
    """Return stored results that pages of the documentation are rendered from."""
    return json.loads((DOCS / "_render" / "results" / f"{name}.json").read_text(encoding="utf-8"))


class Missing(NotImplementedError):
    """The library has no such option, method or function."""


def answer(feature: Callable[[Any], object], peer: Any) -> str:
    """Run one cell of a table: "yes" or "no".

    Raises:
        ModuleNotFoundError: The library is not installed.
    """
    try:
        return "yes" if feature(peer) else "no"
    except Missing:
        return "no"


def cells(results: Any) -> list[tuple[str, str, str]]:
    """Return the feature, the library and the outcome of each cell of a table."""
    return [
        (feature, library, outcome)
        for feature, outcomes in results["features"].items()
        for library, outcome in zip(results["libraries"], outcomes, strict=True)
    ]
