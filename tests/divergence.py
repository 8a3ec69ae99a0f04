"""What a row of the table of differences says; the table is ``tests/divergences.py``."""

from dataclasses import dataclass
from typing import Final, Literal

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Divergence:
    """One observable difference, with the reason and where it is discussed.

    ``torch`` names the releases of torch that have it, as in a requirement; empty stands for all.
    """

    fails_on: Literal["torch", "modkit", "lightzero"]
    reason: str
    upstream: str
    torch: str = ""

    def applies_to(self, version: str) -> bool:
        """Return True if a release of torch has the difference."""
        return SpecifierSet(self.torch).contains(version, prereleases=True)


NO_ISSUE: Final = "no upstream issue"
ISSUES: Final = "https://github.com/pytorch/pytorch/issues/"
PULLS: Final = "https://github.com/pytorch/pytorch/pull/"
