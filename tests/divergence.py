"""What a row of the table of differences says; the table is ``tests/divergences.py``."""

from dataclasses import dataclass
from typing import Final, Literal

from modkit.compat.behaviours import differences


@dataclass(frozen=True)
class Divergence:
    """One observable difference, with the reason and where it is discussed."""

    fails_on: Literal["torch", "modkit", "lightzero"]
    reason: str
    upstream: str


def listed(case: str) -> Divergence:
    """Return the row of a behaviour that `modkit compat` runs, which has its reason."""
    found = differences.DIFFERENCES[case]
    return Divergence("torch", found.reason, found.upstream)


NO_ISSUE: Final = differences.NO_ISSUE
ISSUES: Final = differences.ISSUES
PULLS: Final = "https://github.com/pytorch/pytorch/pull/"
