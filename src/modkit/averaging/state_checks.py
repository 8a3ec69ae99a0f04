"""Reading saved states: what nothing can be made of is a ValueError with its path in the state.

A state comes from a file, so nothing in it is trusted.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor

from modkit.errors import shown


# The sources of states that this library saved, as errors name them.
OWN: Final = "modkit.EMA"
OWN_POSTHOC: Final = "modkit.PostHocEMA"

_LONGEST_REPR: Final = 80
# The exceptions that torch and Python raise where something cannot be made of a value.
_FAILURES: Final = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError),
)


def invalid_state(text: str, owner: str = "EMA") -> ValueError:
    """Return the error for a state that ``owner`` cannot load, printable in a terminal."""
    return ValueError(shown(f"{owner}: {text}. Nothing has been changed."))


@contextmanager
def constructing(path: str) -> Generator[None]:
    """Raise a ValueError with the path of a part of a state, if nothing can be made of it."""
    try:
        yield
    except _FAILURES as error:
        reason = str(error).partition("\n")[0]
        raise invalid_state(f"{path} of the state cannot be loaded: {reason}") from error


def described(value: object) -> str:
    """Return a value as errors show it: in one line, and tensors without their elements."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f", layout {value.layout}"
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"a tensor of dtype {value.dtype}{layout} and shape {shape}"
    line = repr(value)
    return line if len(line) <= _LONGEST_REPR else f"{line[:_LONGEST_REPR]}..."


@dataclass(frozen=True)
class CheckedMapping:
    """A mapping within a state, whose methods return valid values or raise a ValueError.

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
        if not isinstance(cast("object", self.values), Mapping):
            got = described(self.values)
            what = self.path or "the state"
            raise invalid_state(f"{what} must be a mapping, got {got}", self.owner)

    def key(self, name: object) -> str:
        """Return the path of an entry."""
        return f"{self.path}[{name!r}]" if self.path else str(name)

    def refuse(self, name: object, requirement: str) -> NoReturn:
        """Raise the ValueError that says what an entry must be."""
        got = described(self.values[name])
        raise invalid_state(
            f"the state of {self.source} is invalid: {self.key(name)} must be {requirement}, got "
            f"{got}",
            self.owner,
        )

    def get(self, name: Any) -> Any:
        """Return an entry, which must be there."""
        if name not in self.values:
            raise invalid_state(f"the state of {self.source} has no {self.key(name)}", self.owner)
        value = self.values[name]

        # Other libraries may save a number as a tensor with one element.
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
        if is_number and self.source not in (OWN, OWN_POSTHOC):
            value = value.item()
        return value

    def integer(self, name: str, least: int = 0, most: float = math.inf) -> int:
        """Return an entry that must be an int within these limits."""
        # A bool is an ``int`` too, and would pass ``isinstance``.
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            self.refuse(name, f"an int {limits}")
        return value

    def flag(self, name: str) -> bool:
        """Return an entry that must be True or False, or such a number."""
        value = self.get(name)
        if not isinstance(value, int) or value not in (0, 1):
            self.refuse(name, "True or False")
        return bool(value)

    def inside(self, name: Any) -> "CheckedMapping":
        """Return an entry that must be a mapping."""
        return replace(self, values=self.get(name), path=self.key(name))

    def listed(self, name: Any) -> "CheckedMapping":
        """Return an entry that must be a list, as a mapping from indices."""
        entries = self.get(name)
        if not isinstance(entries, (list, tuple)):
            self.refuse(name, "a list")
        return replace(self, values=dict(enumerate(entries)), path=self.key(name))

    def each(self, name: str) -> "list[CheckedMapping]":
        """Return an entry that must be a list of mappings."""
        entries = self.listed(name)
        return [entries.inside(index) for index in entries.values]

    def tensors(self, names: type = str) -> dict[Any, Tensor]:
        """Return all entries, which must be tensors with data under names of this type."""
        for name, value in self.values.items():
            is_tensor = type(name) is names and isinstance(value, Tensor)
            if not is_tensor or value.is_meta or value.is_nested:
                self.refuse(name, f"a tensor with data, under a name of type {names.__name__}")
        return dict(self.values)
