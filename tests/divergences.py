"""The one table of differences between torch and modkit.

A key is a test id without its parameters' ``[...]``. ``fails_on`` names the implementation for
which that test is a strict xfail: ``"torch"`` where modkit fixes a defect of torch, ``"modkit"``
where torch does something that modkit does not. ``docs/parity.md`` is rendered from this table.
"""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Divergence:
    """One observable difference, with the reason and where torch discusses it."""

    fails_on: Literal["torch", "modkit"]
    reason: str
    upstream: str


DIVERGENCES: Final[dict[str, Divergence]] = {}
