"""The cells of the table of features in docs/comparison.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


DOCS = Path(__file__).parents[2] / "docs"


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
