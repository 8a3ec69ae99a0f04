"""The report of a comparison: tables and JSON."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, Final

import torch

from modkit.compat.outcomes import Outcome, difference
from modkit.compat.run import Result


SHOWN: Final = 400
KINDS: Final = ("equal", "listed", "unlisted")


def short(value: Any) -> str:
    """Write a value in at most a few lines."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text)} characters)"


def said(found: Outcome) -> str:
    """Write an outcome in a sentence."""
    kind, *rest, warned = found
    return short(f"{kind} {': '.join(map(str, rest))}{f', warns {warned}' if warned else ''}")


def differs(result: Result) -> tuple[str, str, str]:
    """Return where the outcomes of a case differ, and both values."""
    one, other = result.torch, result.modkit
    found = difference(one, other) if one[0] == other[0] else None
    return (found[0], short(found[1]), short(found[2])) if found else ("", said(one), said(other))


def verdict(result: Result) -> str:
    """Write the result of a check of a model."""
    if result.kind == "unlisted":
        return "differs"
    if result.torch[0] == "skipped":
        return f"skipped: {result.torch[1]}"
    return "equal" if result.torch[0] == "returns" else f"equal: each {said(result.torch)}"


@dataclass(frozen=True)
class Report:
    """The results of one comparison, shown by area or case by case."""

    title: str
    results: Sequence[Result]
    by_area: bool

    @property
    def failed(self) -> bool:
        """True if there is an unlisted difference."""
        return any(each.kind == "unlisted" for each in self.results)

    def counts(self) -> Iterator[tuple[str, list[int]]]:
        """Yield area, number of cases, and number of each kind; the sum comes last."""
        for area in [*dict.fromkeys(each.area for each in self.results), "all"]:
            kinds = [each.kind for each in self.results if area in {each.area, "all"}]
            yield area, [len(kinds), *map(kinds.count, KINDS)]

    def tables(self) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Yield title, headings and rows of each table."""
        versions = ", ".join(map(" ".join, self.versions().items()))
        if self.by_area:
            headings = ("area", "cases", "equal", "listed differences", "unlisted differences")
            yield versions, headings, [(area, *map(str, row)) for area, row in self.counts()]
        else:
            checks = [(each.case, verdict(each)) for each in self.results]
            yield f"{self.title} ({versions})", ("check", "result"), checks
        unlisted = [each for each in self.results if each.kind == "unlisted"]
        if unlisted:
            headings = ("case", "where", "torch", "modkit", "reason")
            rows = [(f"{each.area}: {each.case}", *differs(each), each.reason) for each in unlisted]
            yield "Unlisted differences", headings, rows

    def versions(self) -> dict[str, str]:
        """Return the versions of modkit, torch and Python."""
        modkit = next((each.version for each in distributions(name="modkit")), "from source")
        return {"modkit": modkit, "torch": torch.__version__, "Python": platform.python_version()}

    def as_json(self) -> dict[str, Any]:
        """Return all results as plain data."""
        names = ("cases", *KINDS)
        results = [
            {**each._asdict(), "torch": said(each.torch), "modkit": said(each.modkit)}
            for each in self.results
        ]
        counts = {area: dict(zip(names, row, strict=True)) for area, row in self.counts()}
        facts = {"title": self.title, "versions": self.versions()}
        return {**facts, "areas": counts, "results": results}
