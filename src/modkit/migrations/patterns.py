"""Patterns of tensor names: ``*`` stands for one part of a name, ``**`` for one or more."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final


_WILDCARDS: Final = {"*": r"([^.]+)", "**": r"(.+)"}


def wildcards(pattern: str) -> list[str]:
    """Return the wildcards of a pattern, in order."""
    return [part for part in pattern.split(".") if part in _WILDCARDS]


def check_pattern(pattern: object) -> None:
    """Raise TypeError for what is not a pattern, or has a wildcard within a part of a name."""
    if not isinstance(pattern, str):
        raise TypeError(f"a name of a tensor is a str, got {pattern!r}")
    for part in pattern.split("."):
        if not part or ("*" in part and part not in _WILDCARDS):
            raise TypeError(
                f"{pattern!r} is not a name of tensors: parts are separated by single dots, and * or ** "
                "stands for whole parts"
            )


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return an expression that matches whole names, with a group for each wildcard."""
    parts = (_WILDCARDS.get(part) or re.escape(part) for part in pattern.split("."))
    return re.compile(r"\.".join(parts))


def filled(pattern: str, values: Sequence[str]) -> str:
    """Return the name that a pattern stands for with these values of its wildcards."""
    rest = iter(values)
    return ".".join(next(rest) if part in _WILDCARDS else part for part in pattern.split("."))


def first_match(patterns: Iterable[str], names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first name that one of the patterns with wildcards matches, with that pattern."""
    general = [pattern for pattern in patterns if wildcards(pattern)]
    if not general:
        return None
    return next(
        ((name, one) for name in names for one in general if compiled(one).fullmatch(name)), None
    )
