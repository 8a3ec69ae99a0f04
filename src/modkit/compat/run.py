"""Run the shared behaviours with torch and with modkit."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from modkit.compat.outcomes import MODKIT, TORCH, Outcome, freeze, outcome


Case = Callable[..., Any]
areas: Final[Callable[[], Mapping[str, Mapping[str, Case]]]] = importlib.import_module(
    "modkit.compat.behaviours"
).areas
DIFFERENCES: Final = importlib.import_module("modkit.compat.behaviours.differences").DIFFERENCES


@dataclass(frozen=True)
class Result:
    """What came of one case.

    Args:
        area: Subject of the case.
        case: Its name.
        kind: ``equal``, ``listed`` or ``unlisted``.
        torch: What torch gave.
        modkit: What modkit gave.
        reason: Why the difference is listed, or what is wrong with the list.
    """

    area: str
    case: str
    kind: str
    torch: Outcome
    modkit: Outcome
    reason: str = ""


def run_case(area: str, name: str, case: Case) -> Result:
    """Run one case with both libraries."""
    found = outcome(case, TORCH), outcome(case, MODKIT)
    listed = DIFFERENCES.get(f"{area}: {name}")
    if listed is None:
        return Result(area, name, "equal" if found[0] == found[1] else "unlisted", *found)
    if found == tuple(("returns", freeze(each), []) for each in (listed.torch, listed.modkit)):
        return Result(area, name, "listed", *found, listed.reason)
    text = f"listed with {listed.torch!r} for torch and {listed.modkit!r} for modkit"
    return Result(area, name, "unlisted", *found, text)


def run(chosen: Collection[str] = ()) -> list[Result]:
    """Run the cases of the chosen areas, by default all."""
    return [
        run_case(area, name, case)
        for area, cases in areas().items()
        if not chosen or area in chosen
        for name, case in cases.items()
    ]
