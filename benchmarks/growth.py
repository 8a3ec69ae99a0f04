"""Growth of the time of an operation with the number of modules, up to 40,000, or tensors, to 100,000.

The parameters of the trees are on the meta device: what is timed is the walk over the modules.
Averages and files have parameters of four elements.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

import torch

import modkit
from benchmarks.averages import averaged
from benchmarks.measure import Code, Found, interleaved
from benchmarks.rows import user_model


SIZES: Final = (100, 1_000, 10_000, 40_000)
TENSORS: Final = (100, 1_000, 10_000, 100_000)
PATIENCE: Final = 5.0  # Torch is not measured where one run would take more seconds.
NESTING: Final = 900  # Near the depth that Python's limit of recursion allows torch.


def wide(nn: Any, count: int) -> Any:
    """Make about ``count`` modules: layers in one flat list."""
    return nn.ModuleList(nn.Linear(1, 1, device="meta") for _ in range(count - 2))


def deep(nn: Any, count: int) -> Any:
    """Make about ``count`` modules: a list of chains of nested blocks."""
    chains: list[Any] = []
    while count > 2:
        depth = min(NESTING, math.ceil(count / 2))
        chain = nn.Linear(1, 1, device="meta")
        for _ in range(depth - 1):
            chain = nn.Sequential(nn.Linear(1, 1, device="meta"), chain)
        chains.append(chain)
        count -= 2 * depth
    return nn.ModuleList(chains)


TREES: Final[dict[str, Callable[[ModuleType, int], Any]]] = {"wide": wide, "deep": deep}
OPERATIONS: Final = {
    "load_state_dict()": "m.load_state_dict(state)",
    "state_dict()": "m.state_dict()",
    "modules()": "for _ in m.modules(): pass",
    "named_parameters()": "for _ in m.named_parameters(): pass",
    "half(), float()": "m.half(); m.float()",
    'to("meta", float64), and back': 'm.to("meta", float64); m.to("meta", float32)',
    "train()": "m.train()",
}

SWAP: Final = "EMA.applied()"
AVERAGES: Final = {
    "EMA.update()": "update()",
    SWAP: "with ema.applied(): pass",
    "save_checkpoint()": "save_checkpoint(state, path)",
    "load_checkpoint()": "load_checkpoint(path)",
}
LIBRARIES: Final = ("modkit", "torch")


def exponent(sizes: list[int], times: list[float]) -> float | None:
    """Return the slope of the line through the logarithms: 1 is linear, 2 quadratic."""
    if len(times) < 2:
        return None
    logarithms = [[math.log(value) for value in values] for values in (sizes[: len(times)], times)]
    return round(statistics.linear_regression(*logarithms).slope, 3)


def too_long(sizes: list[int], times: list[float], size: int) -> bool:
    """Return True if the times at smaller sizes predict too long a time for this one."""
    if not sizes or len(times) < len(sizes):
        return bool(sizes)
    return times[-1] * math.pow(size / sizes[-1], exponent(sizes, times) or 2.0) > PATIENCE


def on_trees(tree: str, size: int) -> tuple[int, dict[str, Any]]:
    """Return the number of modules of a tree, and the names for each library."""
    models = {
        n: user_model(nn, TREES[tree](nn, size))
        for n, nn in (("modkit", modkit.nn), ("torch", torch.nn))
    }
    names = {n: {"m": m, "state": m.state_dict(), **vars(torch)} for n, m in models.items()}
    return len(list(models["torch"].modules())), names


def on_tensors(folder: str, size: int) -> tuple[int, dict[str, Any]]:
    """Return the number of tensors, and averages of them and a file for each library."""
    model = torch.nn.ParameterList(torch.zeros(4) for _ in range(size))
    ema, average = modkit.EMA(model), averaged(model, torch.optim.swa_utils)
    for _ in range(3):
        ema.update()
    path = f"{folder}/{size}.pt"
    names = {"m": model, "state": model.state_dict(), "path": path}
    torch.save(names["state"], path)
    ours = {
        **names,
        "update": ema.update,
        "ema": ema,
        "save_checkpoint": modkit.save_checkpoint,
        "load_checkpoint": modkit.load_checkpoint,
    }
    theirs = {
        **names,
        "update": partial(average.update_parameters, model),
        "save_checkpoint": torch.save,
        "load_checkpoint": partial(torch.load, weights_only=True),
    }
    return size, {"modkit": ours, "torch": theirs}


def series_of(
    operations: Mapping[str, str],
    tree: str,
    sizes: tuple[int, ...],
    make: Callable[[int], tuple[int, dict[str, Any]]],
) -> Iterator[Found]:
    """Time operations at all sizes."""
    found: dict[str, Found] = {
        name: {"operation": name, "tree": tree, "sizes": [], "modkit": [], "torch": []}
        for name in operations
    }
    for size in sizes:
        count, names = make(size)
        for operation, series in found.items():
            # torch has no swap.
            skipped = operation == SWAP or too_long(series["sizes"], series["torch"], count)
            arms = {
                n: Code(operations[operation], names[n])
                for n in names
                if n == "modkit" or not skipped
            }
            for name, times in interleaved(arms, 0, rounds=(3, 3)).items():
                series[name].append(statistics.median(times))
            series["sizes"].append(count)
    for series in found.values():
        exponents = {f"{n}_exponent": exponent(series["sizes"], series[n]) for n in LIBRARIES}
        yield {**series, **exponents}


def measure_growth(sizes: tuple[int, ...], tensors: tuple[int, ...] = TENSORS) -> Iterator[Found]:
    """Time all operations on trees and on averages of all sizes."""
    for tree in TREES:
        yield from series_of(OPERATIONS, tree, sizes, partial(on_trees, tree))
    with TemporaryDirectory() as folder:
        yield from series_of(AVERAGES, "tensors", tensors, partial(on_tensors, folder))
