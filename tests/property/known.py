"""Differences that the table lists, matched exactly: one row, one pair of outcomes."""

from collections.abc import Callable
from typing import Any, Final


Outcome = tuple[Any, ...]

# By row of the table of differences: whether it explains a pair of outcomes of an operation.
ROWS: Final[dict[str, Callable[[Any, Outcome, Outcome], bool]]] = {}


def explain(operation: Any, outcomes: list[Outcome]) -> str | None:
    """Return the row that says why the outcomes differ, or None."""
    if outcomes[0] == outcomes[1]:
        return None
    for row, matches in ROWS.items():
        if matches(operation, *outcomes):
            return row
    return None
