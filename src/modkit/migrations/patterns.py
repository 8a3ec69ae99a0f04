"""Patterns of tensor names: ``*`` stands for one part of a name, ``**`` for one or more."""

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Final


_WILDCARDS: Final = {"*": r"([^.]+)", "**": r"(.+)"}


def wildcards(pattern: str) -> list[str]:
    """Return the wildcards of a pattern, in order."""
    return [segment for segment in pattern.split(".") if segment in _WILDCARDS]


def check_pattern(pattern: object) -> None:
    """Raise TypeError for what is not a pattern, or has a wildcard within a part of a name."""
    if not isinstance(pattern, str):
        raise TypeError(f"a name of a tensor is a str, got {pattern!r}")
    for segment in pattern.split("."):
        if not segment or ("*" in segment and segment not in _WILDCARDS):
            raise TypeError(
                f"{pattern!r} is not a name of tensors: parts are separated by single dots, and "
                "* or ** stands for whole parts"
            )


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return an expression that matches whole names, with a group for each wildcard."""
    segments = pattern.split(".")
    return re.compile(r"\.".join(_WILDCARDS.get(s) or re.escape(s) for s in segments))


def matches(pattern: str, names: Collection[str]) -> Iterator[re.Match[str]]:
    """Yield a match, with the value of each wildcard, for each name that is of the pattern."""
    # A full name is looked up, since a module may have thousands of tensors.
    full_names = [pattern] if pattern in names else []
    for name in names if wildcards(pattern) else full_names:
        match = _compiled(pattern).fullmatch(name)
        if match is not None:
            yield match


def filled(pattern: str, values: Sequence[str]) -> str:
    """Return the name that a pattern stands for with these values of its wildcards."""
    remaining = iter(values)
    segments = pattern.split(".")
    return ".".join(next(remaining) if s in _WILDCARDS else s for s in segments)
