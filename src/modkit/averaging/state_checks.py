"""Checks of saved states: each value is validated where it is read, and named in the error.

A state comes from a file, so nothing in it is trusted. ``CheckedMapping`` knows the path of each
value in the state, and errors show it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor

from modkit.averaging.precision import is_averaged
from modkit.errors import shown


# The sources of states that this library saved, as errors name them.
OWN: Final = "modkit.EMA"
OWN_POSTHOC: Final = "modkit.PostHocEMA"

_LONGEST_REPR: Final = 80


def invalid_state(text: str, owner: str = "EMA") -> ValueError:
    """Return the error for a state that cannot be loaded.

    Args:
        text: What is wrong, and what to do.
        owner: The class that loads the state.

    Returns:
        The error, without characters that could control a terminal.
    """
    return ValueError(shown(f"{owner}: {text}. Nothing has been changed."))


def described(value: object) -> str:
    """Return a value as errors show it: in one line, and tensors without their elements."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f", layout {value.layout}"
        return f"a tensor of dtype {value.dtype}{layout} and shape {tuple(value.shape)}"
    line = repr(value)
    return line if len(line) <= _LONGEST_REPR else f"{line[:_LONGEST_REPR]}..."


KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "a mapping": lambda value: isinstance(value, Mapping),
    "a list": lambda value: isinstance(value, (list, tuple)),
    "True or False": lambda value: isinstance(value, int) and value in (0, 1),
    "a tensor": lambda value: isinstance(value, Tensor),
    "a tensor with data": lambda value: not value.is_meta,
    "a dense tensor": lambda value: value.layout == torch.strided,
    "of a floating point or complex dtype": is_averaged,
}
# Of each of these, a kind is tested only if the ones before it hold. Copied tensors may be sparse,
# as buffers with the edges of a graph are; averages are dense.
COPY: Final = ("a tensor", "a tensor with data")
TENSOR: Final = (*COPY, "a dense tensor")
AVERAGE: Final = (*TENSOR, "of a floating point or complex dtype")


@dataclass(frozen=True)
class CheckedMapping:
    """A mapping within a state, whose methods return valid values or raise.

    Attributes:
        source: The library that the state is from, as errors name it.
        values: The entries, which may be anything.
        path: Path of the mapping in the state, such as ``averages[0]['tensors']``; empty for the
            state itself.
        owner: The class that loads the state, with which errors begin.
    """

    source: str
    values: Mapping[Any, Any]
    path: str = ""
    owner: str = "EMA"

    def __post_init__(self) -> None:
        """Refuse a state that is not a mapping; within one, :meth:`inside` has tested that."""
        if not isinstance(cast("object", self.values), Mapping):
            got = described(self.values)
            raise invalid_state(f"the state must be a mapping, got {got}", self.owner)

    def key(self, name: object) -> str:
        """Return the path of an entry."""
        return f"{self.path}[{name!r}]" if self.path else str(name)

    def refuse(self, name: object, requirement: str) -> NoReturn:
        """Raise the ValueError that says what an entry must be.

        Args:
            name: Name of the entry.
            requirement: What it must be, after "must be".

        Raises:
            ValueError: Always, with the path of the entry and what it is.
        """  # noqa: DOC501 - invalid_state() makes a ValueError
        got = described(self.values[name])
        raise invalid_state(
            f"the state of {self.source} is invalid: {self.key(name)} must be {requirement}, got "
            f"{got}",
            self.owner,
        )

    def require(self, names: Iterable[str]) -> None:
        """Check that there are entries.

        Args:
            names: Names that must be there.

        Raises:
            ValueError: If one is missing. It names all of them.
        """  # noqa: DOC501 - invalid_state() makes a ValueError
        # All of them in one error, so that a state is corrected once.
        missing = [self.key(name) for name in names if name not in self.values]
        if missing:
            raise invalid_state(
                f"the state of {self.source} has no {', '.join(missing)}", self.owner
            )

    def get(self, name: Any, kind: str | None = None) -> Any:
        """Return an entry, which must be there.

        Args:
            name: Name of the entry.
            kind: What it must be, one of ``KINDS``; None for anything.

        Raises:
            ValueError: If it is missing or of another kind.
        """
        self.require([name])
        value = self.values[name]

        # Other libraries may save a number as a tensor with one element.
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
        if is_number and self.source not in (OWN, OWN_POSTHOC):
            value = value.item()

        if kind is not None and not KINDS[kind](value):
            self.refuse(name, kind)
        return value

    def integer(self, name: str, least: int = 0, most: float = math.inf) -> int:
        """Return an entry that must be an int.

        Args:
            name: Name of the entry.
            least: Smallest valid value.
            most: Largest valid value.

        Raises:
            ValueError: If it is missing, not an int, or outside of the limits.
        """
        # A bool is an ``int`` too, and would pass ``isinstance``.
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            self.refuse(name, f"an int {limits}")
        return value

    def inside(self, name: Any) -> "CheckedMapping":
        """Return an entry that must be a mapping."""
        return replace(self, values=self.get(name, "a mapping"), path=self.key(name))

    def listed(self, name: Any) -> "CheckedMapping":
        """Return an entry that must be a list, as a mapping from indices."""
        entries = dict(enumerate(self.get(name, "a list")))
        return replace(self, values=entries, path=self.key(name))

    def each(self, name: str) -> "list[CheckedMapping]":
        """Return an entry that must be a list of mappings."""
        entries = self.listed(name)
        return [entries.inside(index) for index in entries.values]

    def check_names(self) -> None:
        """Raise ValueError unless all names are of type ``str``."""
        for name in self.values:
            if not isinstance(name, str):
                self.refuse(name, "a tensor under a name of type str")

    def tensor(self, name: Any, kinds: Iterable[str] = TENSOR) -> Tensor:
        """Return an entry that must be a tensor.

        Args:
            name: Name of the entry, which is there.
            kinds: What it must be, of ``KINDS``, in the order of the tests.

        Raises:
            ValueError: If it is of another kind.
        """
        value: Tensor = self.values[name]
        for kind in kinds:
            if not KINDS[kind](value):
                self.refuse(name, kind)
        return value

    def tensors(self, kinds: Iterable[str] = TENSOR) -> dict[str, Tensor]:
        """Return all entries, which must be tensors under names of type ``str``.

        Args:
            kinds: What they must be, of ``KINDS``, in the order of the tests.

        Raises:
            ValueError: If a name is not a ``str``, or an entry is of another kind.
        """
        self.check_names()
        return {name: self.tensor(name, kinds) for name in self.values}
