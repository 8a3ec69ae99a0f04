from tests.processes import python


# A process of its own, because both libraries change with what ran before: ``torch.compile``, for
# one, replaces ``torch.nn.Module.__init__``, and modkit then calls the replacement.
PROGRAM = """
import gc
import tracemalloc

import torch

import modkit.nn


COUNT = 200


def size(module):
    make = type("Empty", (module,), {})
    # The first instances of a class also pay for what all share. Torch builds a module without its
    # ``__dict__``, and adds that when it is first asked for.
    first = [make().eval() for _ in range(10)]
    kept = [None] * COUNT
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for index in range(COUNT):
        kept[index] = make().eval()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    assert len(first) == 10
    return (after - before) / COUNT


gc.collect()
tracemalloc.start()
print(size(modkit.nn.Module), size(torch.nn.Module))
"""


def test_a_module_is_no_larger_than_torchs() -> None:
    """A module that has been used once takes at most as much memory as torch's."""
    result = python(PROGRAM)
    ours, theirs = map(float, result.stdout.split())

    # A few bytes are noise, such as integers that are cached meanwhile.
    assert ours <= theirs + 4
    assert theirs > 1000
