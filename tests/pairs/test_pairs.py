"""A sample of the pairs; `nox -s pairs` runs them all."""

from pathlib import Path

from tests.cases import for_each
from tests.pairs.features import FEATURES
from tests.pairs.situations import SITUATIONS
from tests.pairs.table import outcome, sample


SAMPLE = [*sample()]


@for_each("feature, situation", SAMPLE)
def test_a_feature_meets_a_situation(feature: str, situation: str, tmp_path: Path) -> None:
    """The pair is right by its oracle, or refused with the text that the table has."""
    assert outcome(feature, situation, tmp_path) != "not sensible"


def test_the_sample_covers_the_table() -> None:
    """Each feature, and each situation on one rank, is in it at least twice."""
    alone = [name for name, each in SITUATIONS.items() if each.ranks == 1]
    for number, names in enumerate((FEATURES, alone)):
        counts = [sum(pair[number] == name for pair in SAMPLE) for name in names]

        assert min(counts) >= 2
