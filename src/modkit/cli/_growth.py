"""How the time of an operation grows with the number of modules.

The trees have no data: their parameters are on the meta device, so that what is timed is the walk
over the modules, which is what a model of tens of thousands of them has to pay.
"""

import math
import statistics
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

import modkit.nn
from modkit.cli._measure import exponent, repetitions, timer
from modkit.cli._module_rows import user_model


SIZES: Final = (100, 1_000, 10_000, 40_000)
ROUNDS: Final = 3
# A measurement of torch that would take longer is left out, and with it all greater sizes.
PATIENCE: Final = 5.0
# Nearly as deep as Python's limit of recursion, 1,000, lets torch go.
NESTING: Final = 900

Tree = Callable[[ModuleType, int], Any]


def siblings(nn: ModuleType, count: int) -> Any:
    """Make about that many modules: layers in one flat list."""
    return nn.ModuleList(nn.Linear(1, 1, device="meta") for _ in range(count - 2))


def blocks(nn: ModuleType, count: int) -> Any:
    """Make about that many modules: chains of blocks, each in the one before, in one flat list.

    A block holds a layer and the next block. A chain is at most 900 blocks deep.
    """
    chains: list[Any] = []
    while count > 2:
        depth = min(NESTING, math.ceil(count / 2))
        chain = nn.Linear(1, 1, device="meta")
        for _ in range(depth - 1):
            chain = nn.Sequential(nn.Linear(1, 1, device="meta"), chain)
        chains.append(chain)
        count -= 2 * depth
    return nn.ModuleList(chains)


TREES: Final[dict[str, Tree]] = {"wide": siblings, "deep": blocks}
OPERATIONS: Final = {
    "load_state_dict()": "m.load_state_dict(state)",
    "state_dict()": "m.state_dict()",
    "modules()": "for _ in m.modules(): pass",
    "named_parameters()": "for _ in m.named_parameters(): pass",
    "half(), float()": "m.half(); m.float()",
    'to("meta", float64), and back': 'm.to("meta", float64); m.to("meta", float32)',
    "train()": "m.train()",
}


@dataclass(frozen=True)
class Series:
    """The times of one operation on trees of one kind.

    Args:
        operation: What is timed.
        tree: ``"wide"`` or ``"deep"``.
        sizes: How many modules the trees have.
        modkit: The seconds that modkit needs on each.
        torch: The seconds that torch needs on the first of them, as long as that is not too long.
    """

    operation: str
    tree: str
    sizes: list[int]
    modkit: list[float]
    torch: list[float]

    @property
    def exponents(self) -> tuple[float, float | None]:
        """The exponents that fit the times of modkit, and of torch where there are several."""
        theirs = exponent(self.sizes[: len(self.torch)], self.torch) if self.torch[1:] else None
        return exponent(self.sizes, self.modkit), theirs


def contestant(nn: ModuleType, tree: str, size: int) -> dict[str, Any]:
    """Make the names that the operations use."""
    model = user_model(nn, TREES[tree](nn, size))
    types = {"float32": torch.float32, "float64": torch.float64}
    return {"m": model, "state": model.state_dict(), **types}


def too_long(series: Series, size: int) -> bool:
    """Tell whether torch may take too long for that size, judged by the sizes before."""
    if len(series.torch) < len(series.sizes):
        return True
    if not series.sizes:
        return False
    slope = exponent(series.sizes, series.torch) if series.torch[1:] else 2.0
    return series.torch[-1] * math.pow(size / series.sizes[-1], slope) > PATIENCE


def in_turns(*subjects: timeit.Timer) -> list[float]:
    """Return the median time of each."""
    numbers = [repetitions(subject) for subject in subjects]
    rounds = [
        [subject.timeit(number) / number for subject, number in zip(subjects, numbers, strict=True)]
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def measure_growth(sizes: tuple[int, ...] = SIZES) -> Iterator[Series]:
    """Time all operations on trees of all sizes, and yield what came of each."""
    for tree in TREES:
        found = {name: Series(name, tree, [], [], []) for name in OPERATIONS}
        for size in sizes:
            ours, theirs = (contestant(nn, tree, size) for nn in (modkit.nn, torch.nn))
            count = sum(1 for _ in ours["m"].modules())
            for name, statement in OPERATIONS.items():
                series = found[name]
                subjects = [timer(statement, ours)]
                if not too_long(series, count):
                    subjects.append(timer(statement, theirs))
                own, *others = in_turns(*subjects)
                series.sizes.append(count)
                series.modkit.append(own)
                series.torch.extend(others)
        yield from found.values()
