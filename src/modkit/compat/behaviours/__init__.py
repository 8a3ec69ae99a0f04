"""The shared behaviors: functions of torch or modkit, by area and name.

A case gives equal results with both libraries, or is listed in ``differences.py`` with both
results.
"""

from modkit.compat.behaviours import hooks, module, state, tools
from modkit.compat.behaviours.cases import Case, Cases
from modkit.compat.behaviours.differences import DIFFERENCES


def areas() -> dict[str, Cases]:
    """Return all cases by area and name, those with a listed difference among them."""
    listed: dict[str, dict[str, Case]] = {}
    for key, difference in DIFFERENCES.items():
        area, _, name = key.partition(": ")
        listed.setdefault(area, {})[name] = difference.case

    tables: dict[str, Cases] = {**module.AREAS, **hooks.AREAS, **state.AREAS, **tools.AREAS}
    return {area: {**cases, **listed.get(area, {})} for area, cases in tables.items()}
