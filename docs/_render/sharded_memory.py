"""The tables of memory and traffic in docs/distributed.md.

The functions are the formulas of that page; tests compare them with measured bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch

from _render.markdown import table
from modkit.averaging.precision import Precision, kept_dtype


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """The parameters that one call of ``fully_shard`` shards.

    Attributes:
        shapes: Shapes of the parameters.
        root: True for the last call, on the whole model: its parameters stay gathered from the forward
            to the end of the backward pass.
    """

    shapes: tuple[Shape, ...]
    root: bool = False

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(map(prod, self.shapes))

    def padded(self, ranks: int) -> int:
        """Return the number of elements after padding the rows to a multiple of the ranks."""
        return sum(ceil(shape[0] / ranks) * ranks * prod(shape[1:]) for shape in self.shapes)

    def shard(self, ranks: int, rank: int = 0) -> int:
        """Return the number of elements of one rank; the first rank has the most."""
        return sum(rows(shape[0], ranks, rank) * prod(shape[1:]) for shape in self.shapes)


def rows(total: int, ranks: int, rank: int) -> int:
    """Return the number of rows of a tensor on one rank."""
    each = ceil(total / ranks)
    return max(0, min(each, total - rank * each))


def bytes_of_average(dtype: torch.dtype, precision: Precision) -> int:
    """Return the bytes of one average of one parameter."""
    return kept_dtype(dtype, precision).itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds from step to step."""

    parameters: int
    gradients: int
    moments: int
    averages: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.parameters + self.gradients + self.moments + self.averages


def memory(
    values: int,
    dtype: torch.dtype = torch.float32,
    precision: Precision = "fp32",
    averages: int = 0,
    moments: int = 2,
) -> Memory:
    """Return the bytes that a rank holds for its parameters: its shards, or with DDP all.

    Args:
        values: The number of parameters that the rank has.
        dtype: Dtype of parameters, gradients and moments.
        precision: Precision of ``modkit.EMA``.
        averages: The number of averages.
        moments: Elements that the optimizer stores per parameter: 2 for AdamW.
    """
    each = dtype.itemsize * values
    kept = averages * bytes_of_average(dtype, precision) * values
    return Memory(each, each, moments * each, kept)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors in the collectives of one step."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends in ring collectives."""
        once = self.all_gather + self.reduce_scatter + 2 * self.all_reduce
        return (ranks - 1) / ranks * once


def fsdp(
    units: Sequence[Unit],
    ranks: int,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
) -> Traffic:
    """Return the traffic of an FSDP2 step: parameters twice (the root once), and gradients."""
    gathered = sum(unit.padded(ranks) * (1 if unit.root else 2) for unit in units)
    reduced = sum(unit.padded(ranks) for unit in units)
    return Traffic(
        all_gather=gathered * param_dtype.itemsize, reduce_scatter=reduced * reduce_dtype.itemsize
    )


def ddp(units: Sequence[Unit], dtype: torch.dtype = torch.float32) -> Traffic:
    """Return the traffic of a DDP step: the gradients."""
    return Traffic(all_reduce=sum(unit.numel for unit in units) * dtype.itemsize)


def tensor_parallel(
    pairs: int, tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> Traffic:
    """Return the traffic of a step with pairs of a colwise and a rowwise layer.

    It reduces the outputs in the forward, and the gradients of the inputs in the backward pass. The
    first pair has trainable layers before it.
    """
    return Traffic(all_reduce=2 * pairs * tokens * width * dtype.itemsize)


# The tables.


RANKS = (1, 2, 4, 8, 64, 1024)
WIDTH, HIDDEN, LAYERS, WORDS, TOKENS = 2048, 5632, 22, 32_000, 8 * 2048
HEADS, KEY_HEADS = 32, 4
HEADER = ("ranks", "no average", "1 average", "3 averages", "FSDP2 sends", "DDP sends", "TP sends")


def decoder() -> list[Unit]:
    """Return the units of a decoder-only language model: one per block, and the rest."""
    keys = WIDTH // HEADS * KEY_HEADS
    attention = [(WIDTH, WIDTH), (keys, WIDTH), (keys, WIDTH), (WIDTH, WIDTH)]
    network = [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    block = Unit((*attention, *network, (WIDTH,), (WIDTH,)))
    rest = Unit(((WORDS, WIDTH), (WIDTH,), (WORDS, WIDTH)), root=True)
    return [*[block] * LAYERS, rest]


def gigabytes(number: float) -> str:
    """Return a number of bytes in GB, with three significant digits."""
    value = number / 1e9
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def sizes() -> str:
    """Return what one rank of each number of ranks holds and sends."""
    units = decoder()
    layers = tensor_parallel(2 * LAYERS, TOKENS, WIDTH, torch.bfloat16)
    lines = []
    for ranks in RANKS:
        here = sum(unit.shard(ranks) for unit in units)
        cells: list[float] = [memory(here, averages=count).total for count in (0, 1, 3)]
        cells += [fsdp(units, ranks, torch.bfloat16).sent(ranks), ddp(units).sent(ranks)]
        # Only ranks that share the heads of keys and values can hold a part of a layer.
        cells += [layers.sent(ranks)] if ranks <= KEY_HEADS and KEY_HEADS % ranks == 0 else []
        texts = [*map(gigabytes, cells), ""]
        lines.append([f"{ranks:,}", *texts[: len(HEADER) - 1]])
    return table(HEADER, lines, numbers=True)


def blocks() -> dict[str, str]:
    """Return the block of the page."""
    return {"sizes": sizes()}
