"""Lists of layers in the names of tensors: their entries, and whether two lists have one order."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias


Shape: TypeAlias = tuple[int, ...]
# None where a parameter has no shape yet.
Shapes: TypeAlias = Mapping[str, Shape | None]
# The entries of a list by number, each with the shapes of its tensors by their names in the entry.
Entries: TypeAlias = dict[int, dict[str, Shape | None]]

# Names from a file may be of any length; what is longer than any attribute path is only counted.
LONGEST_NAME: Final = 1000


def lists_in(shapes: Shapes) -> dict[str, Entries]:
    """Return the entries of each list of layers by number, by the path of the list.

    Example:
        >>> lists_in({"layers.0.fc.weight": (2, 2), "layers.1.fc.weight": (2, 3)})
        {'layers': {0: {'fc.weight': (2, 2)}, 1: {'fc.weight': (2, 3)}}}
    """
    lists: dict[str, Entries] = {}
    for name, shape in shapes.items():
        # Numbers as str() writes them, so that each has one name; lists of layers have no longer
        # ones. A name that begins with a dot is not one of a list without a path.
        for match in re.finditer(r"(?:^|(?<!^)\.)(0|[1-9]\d{0,8})(?=\.)", name[:LONGEST_NAME]):
            entries = lists.setdefault(name[: match.start()], {})
            entries.setdefault(int(match[1]), {})[name[match.end() + 1 :]] = shape
    return lists


def names_below(home: str, entries: Entries, numbers: Iterable[int]) -> list[str]:
    """Return the names of the tensors of some entries of a list."""
    prefix = f"{home}." if home else ""
    return [f"{prefix}{number}.{rest}" for number in numbers for rest in entries[number]]


def is_renumbered(old: Entries, new: Entries) -> bool:
    """Return True if one list has the layers of the other one in their order, and others between.

    A list that only begins with another number, or that goes on where the other one ends, does not
    count: its numbers still say which layer is which.
    """
    few, many = sorted((old, new), key=len)
    first = min(few)
    other_first = min(many)
    if len(few) < 2 or {n - first for n in few} == {n - other_first for n in many}:
        return False

    has_moved = False
    remaining = iter(sorted(many))
    for number in sorted(few):
        other = next((n for n in remaining if many[n] == few[number]), None)
        if other is None:
            return False
        # By its number, it would be another layer.
        has_moved = has_moved or (number != other and number in many)
    return has_moved
