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
@pytest.mark.parametrize("name", ["Module", "ReLU", "Identity", "Linear", "Sequential"])
def test_a_module_is_no_larger_than_torchs(name: str) -> None:
    """A module that has been used once takes at most as much memory as torch's."""
    arguments = (1, 1) if name == "Linear" else ()
    # Torch builds a module without its ``__dict__``, and adds that when it is first asked for.
    ours = size(lambda: getattr(modkit.nn, name)(*arguments).eval())
    theirs = size(lambda: getattr(torch.nn, name)(*arguments).eval())

    # A layer has one attribute more, which tells fx that it is a leaf: a pointer. A few bytes are
    # noise, such as integers that are cached meanwhile.
    assert ours <= theirs + (0 if name == "Module" else 8) + 4
    assert theirs > 1000
