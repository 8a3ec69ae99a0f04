"""The driver of long runs counts operations, and reduces differing sequences."""

import pytest

from tests.divergences import DIVERGENCES
from tests.property import known, long_run
from tests.property.operations import OPERATIONS, Kind
from tests.property.trees import NODES


def test_the_seed_decides_the_sequence() -> None:
    """A seed gives the same sequence each time, and sequences of both kinds are drawn."""
    drawn = [long_run.Sequence(seed) for seed in range(12)]

    assert [each.operations for each in drawn] == [
        long_run.Sequence(seed).operations for seed in range(12)
    ]
    assert {each.scoped for each in drawn} == {False, True}


def test_a_portion_counts_what_ran() -> None:
    """The counts of run and skipped operations add up, without a difference."""
    found = long_run.portion(0, 4)

    assert found["differences"] == []
    assert sum(found["kinds"].values()) > 40


def test_a_difference_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that shows a difference is reduced to the operation that causes it."""

    def broken(side, module) -> str:
        return side.impl.name

    sequence = next(
        each
        for each in map(long_run.Sequence, range(100))
        if not each.scoped and any(one.kind == "evaluate" for one in each.operations)
    )
    monkeypatch.setitem(OPERATIONS, "evaluate", Kind(broken, ()))
    text, kept = sequence.reduced()

    assert text.startswith("Difference: torch and modkit differ after Operation(kind='evaluate'")
    assert [one.kind for one in kept] == ["evaluate"]


def test_rows_stand_in_the_table() -> None:
    """A difference is only explained by a row of the table of differences."""
    assert {*known.ROWS} <= {*DIVERGENCES}
    assert len(NODES) > 80
