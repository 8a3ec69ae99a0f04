"""Patterns of names: what they match, and in which time."""

import itertools
import re
import time

import pytest

from modkit.migrations.patterns import matches
from tests.cases import for_each


WILDCARDS = {"*": "([^.]+)", "**": "(.+)"}
PARTS = ["*", "**", "a", "b"]
PATTERNS = [".".join(p) for size in (1, 2, 3, 4) for p in itertools.product(PARTS, repeat=size)]
PATTERNS = [pattern for pattern in PATTERNS if pattern.split(".").count("**") < 2]
NAMES = [
    ".".join(n) for size in (1, 2, 3, 4, 5) for n in itertools.product(["a", "b"], repeat=size)
]
NAMES += ["", ".", "a.", ".a", "a..b", "a...b", "..", "a.b..", "b..a.b"]


def test_patterns_match_as_regular_expressions() -> None:
    """Each name of up to five parts, empty ones too, has the match that `re` finds first."""
    for pattern in PATTERNS:
        expression = re.compile(
            r"\.".join(WILDCARDS.get(part, part) for part in pattern.split("."))
        )
        expected = [
            (name, match.groups())
            for name in NAMES
            if (match := expression.fullmatch(name)) is not None
        ]
        assert [tuple(match) for match in matches(pattern, NAMES)] == expected, pattern


@for_each("pattern", ["**.a.weight", "**.x", "a.**", "*.*.weight", "**"])
def test_a_long_name_takes_time_in_proportion_to_its_length(pattern) -> None:
    """A file chooses the names; by backtracking, 16,000 characters would take minutes."""
    times = {}
    for repeats in 1_500, 24_000:
        name = "a.b." * repeats + "x"
        start = time.process_time()
        found = [*matches(pattern, [name])]
        times[repeats] = time.process_time() - start
        assert len(found) == (pattern in ("**", "**.x", "a.**"))

    assert times[1_500] < 0.5
    assert times[24_000] < max(0.5, 80 * times[1_500])


@pytest.mark.parametrize("pattern", ["a.b", "**"])
def test_full_names_are_looked_up(pattern) -> None:
    """A pattern without wildcards is a name, with dots of its own."""
    assert [match.name for match in matches(pattern, {"a.b": 0})] == ["a.b"]
