"""Run the shared behaviors with torch and with modkit, and report the results."""

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


# Longer values are cut in tables.
SHOWN: Final = 400
# Shared behaviors may raise; a check of a model that raises on both sides has compared nothing.
NOT_COMPARED: Final = "not compared"
KINDS: Final = ("equal", "listed", "unlisted", NOT_COMPARED)


class Result(NamedTuple):
    """Both outcomes of a case.

    Attributes:
        area: Subject of the case.
        case: Its name.
        kind: One of ``KINDS``.
        torch: The outcome with torch.
        modkit: The outcome with modkit.
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
    left = outcome(case, Library("torch"))
    right = outcome(case, Library("modkit"))

    listed = DIFFERENCES.get(f"{area}: {name}")
    if listed is None:
        return Result(area, name, "equal" if left == right else "unlisted", left, right)

    # Exactly as listed, and without a warning.
    expected_left: Outcome = ("returns", freeze(listed.torch), [])
    expected_right: Outcome = ("returns", freeze(listed.modkit), [])
    if (left, right) == (expected_left, expected_right):
        return Result(area, name, "listed", left, right, listed.reason)
    reason = f"listed with {listed.torch!r} for torch and {listed.modkit!r} for modkit"
    return Result(area, name, "unlisted", left, right, reason)


def run(
    chosen: Collection[str] = (), progress: Callable[[float], object] = lambda fraction: None
) -> list[Result]:
    """Run the cases of some areas."""
    cases = [
        (area, name, case)
        for area, named_cases in areas().items()
        for name, case in named_cases.items()
        if not chosen or area in chosen
    ]
    results: list[Result] = []
    for area, name, case in cases:
        results.append(run_case(area, name, case))
        progress(len(results) / len(cases))
    return results


def _short(value: Any) -> str:
    """Write a value in a table, cut if it is long."""
    written = str(value)
    if len(written) <= SHOWN:
        return written
    return f"{written[:SHOWN]} ... ({len(written)} characters)"


def _sentence(result: Outcome) -> str:
    """Write an outcome as a sentence."""
    kind, *rest, warned = result
    sentence = f"{kind} {': '.join(map(str, rest))}"
    if warned:
        sentence = f"{sentence}, warns {warned}"
    return _short(sentence)


def _differs(result: Result) -> tuple[str, str, str]:
    """Return where the outcomes of a case differ, and both values."""
    left, right = result.torch, result.modkit
    # If one side raised and the other did not, both outcomes are shown as a whole.
    place = difference(left, right) if left[0] == right[0] else None
    if place is None:
        return "", _sentence(left), _sentence(right)
    path, left_value, right_value = place
    return path, _short(left_value), _short(right_value)


def _verdict(result: Result) -> str:
    if result.kind == "unlisted":
        return "differs"
    # Before the test for equality: a check that is skipped on both sides is equal.
    if result.torch[0] == "skipped":
        return f"skipped: {result.torch[1]}"
    if result.kind == "equal":
        return "equal"
    return f"{result.kind}: each {_sentence(result.torch)}"


@dataclass(frozen=True)
class Report:
    """The results of one comparison.

    Attributes:
        title: What was compared.
        results: One for each case.
        by_area: Whether tables have a row for each area, in place of one for each case.
    """

    title: str
    results: Sequence[Result]
    by_area: bool

    def failed(self) -> bool:
        """Return True if a check differs, or the model cannot be called or loaded on either side.

        ``torch.compile``, ``torch.fx`` and ``torch.export`` refuse many models, which is not a
        failure.
        """
        kinds = {result.case: result.kind for result in self.results}
        needed = [kind for check, kind in kinds.items() if not check.startswith("torch.")]
        return "unlisted" in kinds.values() or NOT_COMPARED in needed

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of cases and of each kind by area."""
        counts: dict[str, dict[str, int]] = {}
        for area in [*dict.fromkeys(result.area for result in self.results), "all"]:
            kinds = [result.kind for result in self.results if area in {result.area, "all"}]
            counts[area] = {"cases": len(kinds), **{kind: kinds.count(kind) for kind in KINDS}}
        return counts

    def tables(self) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Yield each table."""
        versions = ", ".join(map(" ".join, self.versions().items()))
        if self.by_area:
            headings = ("area", "cases", "equal", "listed differences", "unlisted differences")
            counts = self.counts().items()
            shown = ("cases", "equal", "listed", "unlisted")
            rows = [(area, *(str(row[kind]) for kind in shown)) for area, row in counts]
            yield versions, headings, rows
        else:
            checks = [(result.case, _verdict(result)) for result in self.results]
            yield f"{self.title} ({versions})", ("check", "result"), checks

        headings = ("case", "where", "torch", "modkit", "reason")
        for kind in ("unlisted", "listed"):
            rows = [
                (f"{result.area}: {result.case}", *_differs(result), result.reason)
                for result in self.results
                if result.kind == kind
            ]
            if rows:
                yield f"{kind.capitalize()} differences", headings, rows

    def versions(self) -> dict[str, str]:
        """Return the versions of modkit, torch and Python."""
        python = platform.python_version()
        return {"modkit": __version__, "torch": torch.__version__, "Python": python}

    def as_json(self) -> dict[str, Any]:
        """Return all results as plain data."""
        results = [
            {
                **result._asdict(),
                # As sentences: frozen outcomes may be long, and are tuples of nested data.
                "torch": _sentence(result.torch),
                "modkit": _sentence(result.modkit),
            }
            for result in self.results
        ]

        return {
            "title": self.title,
            "versions": self.versions(),
            "areas": self.counts(),
            "results": results,
        }
