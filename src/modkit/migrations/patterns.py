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


class Match(NamedTuple):
    """A name that is of a pattern, and the values of the wildcards in it, in order."""

    name: str
    values: tuple[str, ...]


def matches(pattern: str, names: Collection[str]) -> Iterator[Match]:
    """Yield a match for each name that is of the pattern, with as much as possible in each ``**``.

    A name comes from a file, and takes time linear in its length.
    """
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
    if len(parts) < len(pattern):
        return None
    # Most names differ in the first or the last part.
    for segment, part in (pattern[0], parts[0]), (pattern[-1], parts[-1]):
        if segment != part and segment not in _WILDCARDS:
            return None

    # From the end: where the rest of the pattern may begin to match the rest of the name.
    begins = [{len(parts)}]
    for segment in reversed(pattern):
        rest = begins[-1]
        if segment == "**":
            # One part or more, up to the last place where the rest may begin; not an empty one.
            last = max(rest, default=0)
            begin = {i for i in range(last) if parts[i] or i + 1 < last}
        else:
            begin = {i - 1 for i in rest if i and _fits(segment, parts[i - 1])}
        begins.append(begin)

    position = 0
    if position not in begins.pop():
        return None
    values: list[str] = []
    for segment in pattern:
        rest = begins.pop()
        end = max(rest) if segment == "**" else position + 1
        if segment in _WILDCARDS:
            values.append(".".join(parts[position:end]))
        position = end
    return tuple(values)


def _fits(segment: str, part: str) -> bool:
    return bool(part) if segment == "*" else segment == part


def filled(pattern: str, values: Sequence[str]) -> str:
    """Return the name that a pattern stands for with these values of its wildcards."""
    remaining = iter(values)
    segments = pattern.split(".")
    return ".".join(next(remaining) if s in _WILDCARDS else s for s in segments)
