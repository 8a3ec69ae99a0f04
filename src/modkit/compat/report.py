"""The report of a comparison: tables for the terminal, a page, and JSON."""

import html
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from typing import Any, Final

import torch

from modkit.compat.outcomes import Outcome, difference
from modkit.compat.run import Result


SHOWN: Final = 400
KINDS: Final = ("equal", "listed", "unlisted")
_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>modkit compat</title>
<style>body{{font:15px/1.4 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}}
table{{border-collapse:collapse;margin:1em 0}}td,th{{border:1px solid #8886;padding:.3em .6em;
text-align:left;vertical-align:top;overflow-wrap:anywhere}}</style><h1>modkit compat</h1>{}</html>
"""


def short(value: Any) -> str:
    """Write a value in at most a few lines."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text)} characters)"


def said(found: Outcome) -> str:
    """Write an outcome in a sentence."""
    kind, *rest, warned = found
    return short(f"{kind} {': '.join(map(str, rest))}{f', warns {warned}' if warned else ''}")


def differs(result: Result) -> tuple[str, str, str]:
    """Return where the outcomes of a case differ, and what stands there."""
    one, other = result.torch, result.modkit
    found = difference(one, other) if one[0] == other[0] else None
    return (found[0], short(found[1]), short(found[2])) if found else ("", said(one), said(other))


@dataclass(frozen=True)
class Report:
    """The results of one comparison.

    Args:
        title: What was compared.
        results: One for each case.
        by_area: Show a row for each area in place of a row for each case.
    """

    title: str
    results: Sequence[Result]
    by_area: bool

    @property
    def failed(self) -> bool:
        """True if there is an unlisted difference."""
        return any(each.kind == "unlisted" for each in self.results)

    def counts(self) -> Iterator[tuple[str, list[int]]]:
        """Yield area, cases, and counts of each kind; the sum comes last."""
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
            checks = [
                (r.case, "differs" if r.kind == "unlisted" else said_equal(r)) for r in self.results
            ]
            yield f"{self.title} ({versions})", ("check", "result"), checks
        for kind in ("unlisted", "listed"):
            found = [each for each in self.results if each.kind == kind]
            if found:
                headings = ("case", "where", "torch", "modkit", "reason")
                rows = [
                    (f"{each.area}: {each.case}", *differs(each), each.reason) for each in found
                ]
                yield f"{kind.capitalize()} differences", headings, rows

    def versions(self) -> dict[str, str]:
        """Return the versions of what was compared."""
        modkit = next((each.version for each in distributions(name="modkit")), "from source")
        return {"modkit": modkit, "torch": torch.__version__, "Python": platform.python_version()}

    def as_json(self) -> dict[str, Any]:
        """Return all results as plain data."""
        names = ("cases", *KINDS)
        results = [
            {**asdict(each), "torch": said(each.torch), "modkit": said(each.modkit)}
            for each in self.results
        ]
        counts = {area: dict(zip(names, row, strict=True)) for area, row in self.counts()}
        return {
            "title": self.title,
            "versions": self.versions(),
            "areas": counts,
            "results": results,
        }

    def as_html(self) -> str:
        """Return one page that needs nothing else."""
        parts: list[str] = []
        for title, headings, rows in self.tables():
            cells = [[f"<th>{html.escape(each)}" for each in headings]]
            cells += [[f"<td>{html.escape(each)}" for each in row] for row in rows]
            body = "\n".join(f"<tr>{''.join(row)}" for row in cells)
            parts.append(f"<h2>{html.escape(title)}</h2>\n<table>\n{body}\n</table>")
        return _PAGE.format("\n".join(parts))


def said_equal(result: Result) -> str:
    """Write what both gave, where that is not a value."""
    if result.torch[0] == "skipped":
        return f"skipped: {result.torch[1]}"
    return "equal" if result.torch[0] == "returns" else f"equal: each {said(result.torch)}"
