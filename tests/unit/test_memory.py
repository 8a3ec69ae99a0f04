import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import torch

import modkit.nn


COUNT = 200


@pytest.fixture
def _traced() -> Iterator[None]:
    """Trace allocations until the test ends."""
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def size(make: Callable[[], object]) -> float:
    """Return how many bytes of Python's memory one object takes."""
    # The first instances of a class also pay for what all share.
    first = [make() for _ in range(10)]
    kept: list[object] = [None] * COUNT
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for index in range(COUNT):
        kept[index] = make()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    assert len(first) == 10
    return (after - before) / COUNT


@pytest.mark.usefixtures("_traced")
def test_a_module_is_no_larger_than_torchs() -> None:
    """A module that has been used once takes at most as much memory as torch's."""
    # How Python lays out a ``__dict__`` depends on what the class has been used for before. Torch
    # builds a module without its ``__dict__``, and adds that when it is first asked for.
    mine = type("Empty", (modkit.nn.Module,), {})
    its = type("Empty", (torch.nn.Module,), {})
    ours = size(lambda: mine().eval())
    theirs = size(lambda: its().eval())

    # A few bytes are noise, such as integers that are cached meanwhile.
    assert ours <= theirs + 4
    assert theirs > 1000
