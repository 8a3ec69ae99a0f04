"""Run the shared behaviors with torch and with modkit, and report results as tables, JSON or a page."""

import html
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from modkit import __version__
from modkit.compat.behaviours import areas
from modkit.compat.behaviours.cases import Case
from modkit.compat.behaviours.differences import DIFFERENCES
from modkit.compat.outcomes import Library, Outcome, difference, freeze, outcome


SHOWN: Final = 400
# Shared behaviors may raise; a check of a model that raises on both sides has compared nothing.
NOT_COMPARED: Final = "not compared"
KINDS: Final = ("equal", "listed", "unlisted", NOT_COMPARED)
_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>modkit compat</title>
<style>body{font:15px system-ui,sans-serif;margin:2em} table{border-collapse:collapse}
td,th{border:1px solid #8886;padding:.3em .6em;text-align:left;overflow-wrap:anywhere}</style>
"""


class Result(NamedTuple):
    """Both outcomes of a case, one of ``KINDS``, and the reason for a difference."""

    area: str
    case: str
    kind: str
    torch: Outcome
    modkit: Outcome
    reason: str = ""


def run_case(area: str, name: str, case: Case) -> Result:
    """Run one case with both libraries."""
    found = outcome(case, Library("torch")), outcome(case, Library("modkit"))
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
    found = {name: cases for name, cases in areas().items() if not chosen or name in chosen}
    cases = [(area, *case) for area, named in found.items() for case in named.items()]
    results: list[Result] = []
    for each in cases:
        results.append(run_case(*each))
        progress(len(results) / len(cases))
    return results


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text)} characters)"


def _said(found: Outcome) -> str:
    kind, *rest, warned = found
    return _short(f"{kind} {': '.join(map(str, rest))}{f', warns {warned}' if warned else ''}")


def _differs(result: Result) -> tuple[str, ...]:
    """Return where the outcomes of a case differ, and both values."""
    one, other = result.torch, result.modkit
    found = difference(one, other) if one[0] == other[0] else None
    return (found[0], *map(_short, found[1:])) if found else ("", _said(one), _said(other))


def _verdict(result: Result) -> str:
    if result.kind == "unlisted":
        return "differs"
    if result.torch[0] == "skipped":
        return f"skipped: {result.torch[1]}"
    return "equal" if result.kind == "equal" else f"{result.kind}: each {_said(result.torch)}"


@dataclass(frozen=True)
class Report:
    """The results of one comparison, shown by area or case by case."""

    title: str
    results: Sequence[Result]
    by_area: bool

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of cases and of each kind by area; the sum comes last."""
        found: dict[str, dict[str, int]] = {}
        for area in [*dict.fromkeys(each.area for each in self.results), "all"]:
            kinds = [each.kind for each in self.results if area in {each.area, "all"}]
            found[area] = {"cases": len(kinds), **{kind: kinds.count(kind) for kind in KINDS}}
        return found

    def tables(self) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Yield title, headings and rows of each table."""
        versions = ", ".join(map(" ".join, self.versions().items()))
        if self.by_area:
            headings = ("area", "cases", "equal", "listed differences", "unlisted differences")
            counts = self.counts().items()
            shown = ("cases", "equal", "listed", "unlisted")
            rows = [(area, *(str(row[kind]) for kind in shown)) for area, row in counts]
            yield versions, headings, rows
        else:
            checks = [(each.case, _verdict(each)) for each in self.results]
            yield f"{self.title} ({versions})", ("check", "result"), checks
        headings = ("case", "where", "torch", "modkit", "reason")
        for kind in ("unlisted", "listed"):
            found = [each for each in self.results if each.kind == kind]
            rows = [(f"{each.area}: {each.case}", *_differs(each), each.reason) for each in found]
            if rows:
                yield f"{kind.capitalize()} differences", headings, rows

    def versions(self) -> dict[str, str]:
        """Return the versions of modkit, torch and Python."""
        python = platform.python_version()
        return {"modkit": __version__, "torch": torch.__version__, "Python": python}

    def as_json(self) -> dict[str, Any]:
        """Return all results as plain data."""
        results = [
            {**each._asdict(), "torch": _said(each.torch), "modkit": _said(each.modkit)}
            for each in self.results
        ]
        facts = {"title": self.title, "versions": self.versions(), "areas": self.counts()}
        return {**facts, "results": results}

    def as_html(self) -> str:
        """Return a self-contained page with all tables."""
        parts = [_PAGE]
        for title, headings, rows in self.tables():
            parts.append(f"<h1>{html.escape(title)}</h1>\n<table>")
            for tag, row in [("th", headings), *(("td", row) for row in rows)]:
                parts.append("".join(["<tr>", *(f"<{tag}>{html.escape(each)}" for each in row)]))
            parts.append("</table>")
        return "\n".join(parts)
