"""What a row of the table of differences says; the table is ``tests/divergences.py``."""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Divergence:
    """One observable difference, with the reason and where it is discussed."""

    fails_on: Literal["torch", "modkit", "lightzero"]
    reason: str
    upstream: str


NO_ISSUE: Final = "no upstream issue"
ISSUES: Final = "https://github.com/pytorch/pytorch/issues/"
PULLS: Final = "https://github.com/pytorch/pytorch/pull/"
