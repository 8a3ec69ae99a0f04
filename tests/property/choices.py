"""Choices that operations and trees are drawn from, with any `random.Random`.

The long run draws with a generator of its own, Hypothesis with one whose decisions it records and
shrinks. The functions have the names of Hypothesis' strategies.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that is drawn later."""

    draw: Callable[[random.Random], T]

    def __or__(self, other: "Choice[U]") -> "Choice[T | U]":
        """Draw one or the other."""
        return one_of(self, other)

    def strategy(self) -> st.SearchStrategy[T]:
        """Return the strategy of Hypothesis that draws the same values."""
        return st.randoms(use_true_random=False).map(self.draw)


def just(value: T) -> Choice[T]:
    """Always the same value."""
    return Choice(lambda _: value)


def none() -> Choice[None]:
    """Nothing."""
    return just(None)


def sampled_from(values: Sequence[T]) -> Choice[T]:
    count = len(values)
    return Choice(lambda source: values[source.randrange(count)])


def booleans() -> Choice[bool]:
    return Choice(lambda source: source.randrange(2) == 1)


def integers(least: int, most: int) -> Choice[int]:
    """Draw a number of the closed range."""
    count = most - least + 1
    return Choice(lambda source: least + source.randrange(count))


def one_of(*choices: Choice[Any]) -> Choice[Any]:
    """Draw from one of the choices."""
    return Choice(lambda source: choices[source.randrange(len(choices))].draw(source))


def tuples(*choices: Choice[Any]) -> Choice[tuple[Any, ...]]:
    return Choice(lambda source: tuple(choice.draw(source) for choice in choices))


def builds(function: Callable[..., T], *choices: Choice[Any]) -> Choice[T]:
    """Call the function with one draw of each choice."""
    return Choice(lambda source: function(*(choice.draw(source) for choice in choices)))


def lists(
    choice: Choice[T], *, min_size: int = 0, max_size: int, unique: bool = False
) -> Choice[list[T]]:
    """Draw a list; with `unique` it may be shorter."""

    def draw(source: random.Random) -> list[T]:
        size = min_size + source.randrange(max_size - min_size + 1)
        drawn = [choice.draw(source) for _ in range(size)]
        return list(dict.fromkeys(drawn)) if unique else drawn

    return Choice(draw)


def optional(choices: Mapping[str, Choice[Any]]) -> Choice[dict[str, Any]]:
    """Draw a dict with some of the keys."""

    def draw(source: random.Random) -> dict[str, Any]:
        return {name: c.draw(source) for name, c in choices.items() if source.randrange(2) == 1}

    return Choice(draw)


# How a function that composes choices draws from one of them.
Draw = Callable[[Choice[Any]], Any]


def composite(function: Callable[..., T]) -> Callable[..., Choice[T]]:
    """Turn a function whose first argument draws into a choice."""

    def made(*args: Any) -> Choice[T]:
        return Choice(lambda source: function(lambda choice: choice.draw(source), *args))

    return made
