"""Run the shared behaviours with torch and with modkit."""

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from modkit.compat.outcomes import MODKIT, TORCH, Outcome, freeze, outcome


Case = Callable[..., Any]
areas: Final[Callable[[], Mapping[str, Mapping[str, Case]]]] = importlib.import_module(
    "modkit.compat.behaviours"
).areas
DIFFERENCES: Final = importlib.import_module("modkit.compat.behaviours.differences").DIFFERENCES


class Result(NamedTuple):
    """Both outcomes of a case: ``equal``, ``listed`` or ``unlisted``, and the reason for the latter."""

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


def run(
    chosen: Collection[str] = (), progress: Callable[[float], object] = lambda part: None
) -> list[Result]:
    """Run the cases of the chosen areas, by default all, and report the completed fraction."""
    cases = [
        (area, name, case)
        for area, cases in areas().items()
        if not chosen or area in chosen
        for name, case in cases.items()
    ]
    results: list[Result] = []
    for each in cases:
        results.append(run_case(*each))
        progress(len(results) / len(cases))
    return results
