"""Patterns of tensor names: ``*`` stands for one part of a name, ``**`` for one or more."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple


_WILDCARDS: Final = {"*", "**"}


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
    if pattern.split(".").count("**") > 1:
        raise TypeError(f"{pattern!r} has several **, so a name could be read in several ways")


class Match(NamedTuple):
    """A name that is of a pattern, and the values of the wildcards in it, in order."""

    name: str
    values: tuple[str, ...]


def matches(pattern: str, names: Collection[str]) -> Iterator[Match]:
    """Yield a match for each name that is of the pattern."""
    if not wildcards(pattern):
        # A full name is looked up, since a module may have thousands of tensors.
        if pattern in names:
            yield Match(pattern, ())
        return

    segments = pattern.split(".")
    for name in names:
        values = _values(segments, name.split("."))
        if values is not None:
            yield Match(name, values)


def _values(pattern: list[str], parts: list[str]) -> tuple[str, ...] | None:
    """Return the values of the wildcards of a pattern in the parts of a name, or None."""
    if "**" in pattern:
        # It takes all that the other segments leave, so a long name of a file has one reading.
        start = pattern.index("**")
        end = len(parts) - (len(pattern) - start - 1)
        parts = [*parts[:start], ".".join(parts[start:end]), *parts[max(start, end) :]]
    if len(parts) != len(pattern) or not all(map(_fits, pattern, parts)):
        return None
    return tuple(
        part for segment, part in zip(pattern, parts, strict=True) if segment in _WILDCARDS
    )


def _fits(segment: str, part: str) -> bool:
    return part != "" if segment in _WILDCARDS else segment == part


def filled(pattern: str, values: Sequence[str]) -> str:
    """Return the name that a pattern stands for with these values of its wildcards."""
    remaining = iter(values)
    segments = pattern.split(".")
    return ".".join(next(remaining) if s in _WILDCARDS else s for s in segments)
