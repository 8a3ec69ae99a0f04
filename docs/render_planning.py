"""Write the tables of docs/distributed_planning.md: `python docs/render_planning.py`.

The functions are the formulas of that page; tests hold them against what is measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

import torch

from modkit.averaging.precision import PRECISIONS, Precision, kept_dtype


PAGE = Path(__file__).resolve().parent / "distributed_planning.md"
MARKS = "<!-- {name}: by docs/render_planning.py -->", "<!-- end of {name} -->"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """What one call of ``fully_shard`` splits up.

    Attributes:
        shapes: Those of the parameters.
        root: Whether it is the last call, for the model as a whole: what that one has gathered for the
            forward stays until the backward pass is through.
    """

    shapes: tuple[Shape, ...]
    root: bool = False

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(map(prod, self.shapes))

    def padded(self, ranks: int) -> int:
        """Return the same with rows added until the ranks can share each of them evenly."""
        return sum(ceil(shape[0] / ranks) * ranks * prod(shape[1:]) for shape in self.shapes)

    def shard(self, ranks: int, rank: int = 0) -> int:
        """Return how many of them one rank has; none has more than the first."""
        return sum(rows(shape[0], ranks, rank) * prod(shape[1:]) for shape in self.shapes)


def rows(total: int, ranks: int, rank: int) -> int:
    """Return how many rows one rank has of a tensor."""
    each = ceil(total / ranks)
    return max(0, min(each, total - rank * each))


def bytes_of_average(dtype: torch.dtype, precision: Precision) -> int:
    """Return what one average of one parameter takes."""
    kept = kept_dtype(dtype, precision)
    parts = 2 if precision == "compensated" and kept == dtype else 1
    return parts * kept.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds from step to step."""

    parameters: int
    gradients: int
    moments: int
    averages: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.moments + self.averages


def memory(
    values: int,
    dtype: torch.dtype = torch.float32,
    precision: Precision = "fp32",
    averages: int = 0,
    moments: int = 2,
) -> Memory:
    """Return what a rank holds for so many parameters: its shards, or with DDP all.

    Args:
        values: The number of parameters that the rank has.
        dtype: Theirs, which is that of gradients and moments, too.
        precision: That of ``modkit.EMA``.
        averages: The number of averages.
        moments: How many numbers the optimizer has for a parameter: 2 for AdamW.
    """
    each = dtype.itemsize * values
    kept = averages * bytes_of_average(dtype, precision) * values
    return Memory(each, each, moments * each, kept)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors that are gathered, reduced or both, in one step."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    def sent(self, ranks: int) -> float:
        """Return what each rank sends, if collectives go around a ring."""
        once = self.all_gather + self.reduce_scatter + 2 * self.all_reduce
        return (ranks - 1) / ranks * once


def fsdp(
    units: Sequence[Unit],
    ranks: int,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
) -> Traffic:
    """Return what a step with FSDP2 exchanges: parameters twice, but for the root, and gradients."""
    gathered = sum(unit.padded(ranks) * (1 if unit.root else 2) for unit in units)
    reduced = sum(unit.padded(ranks) for unit in units)
    return Traffic(
        all_gather=gathered * param_dtype.itemsize, reduce_scatter=reduced * reduce_dtype.itemsize
    )


def ddp(units: Sequence[Unit], dtype: torch.dtype = torch.float32) -> Traffic:
    """Return what a step with DDP exchanges: the gradients."""
    return Traffic(all_reduce=sum(unit.numel for unit in units) * dtype.itemsize)


def tensor_parallel(
    pairs: int, tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> Traffic:
    """Return what a step with pairs of a colwise and a rowwise layer exchanges.

    That is the sum of the outputs in the forward, and of the gradients of the inputs in the backward
    pass, even of the first pair: there is something before it that learns.
    """
    return Traffic(all_reduce=2 * pairs * tokens * width * dtype.itemsize)


# The tables.


RANKS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WIDTH, HIDDEN, LAYERS, WORDS, TOKENS = 2048, 5632, 22, 32_000, 8 * 2048
HEADS, KEY_HEADS = 32, 4
HEADER = ("ranks", "no average", "1 average", "3 averages", "FSDP2 sends", "DDP sends", "TP sends")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def decoder() -> list[Unit]:
    """Return the units of a language model of the usual kind: a block each, and the rest."""
    keys = WIDTH // HEADS * KEY_HEADS
    attention = [(WIDTH, WIDTH), (keys, WIDTH), (keys, WIDTH), (WIDTH, WIDTH)]
    network = [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    block = Unit((*attention, *network, (WIDTH,), (WIDTH,)))
    rest = Unit(((WORDS, WIDTH), (WIDTH,), (WORDS, WIDTH)), root=True)
    return [*[block] * LAYERS, rest]


def table(header: Sequence[str], lines: Iterator[Sequence[str]]) -> str:
    """Return a table of Markdown, the first column to the left and all others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def gigabytes(number: float) -> str:
    """Write a number of bytes with three digits that count."""
    value = number / 1e9
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def precisions() -> str:
    """Return the bytes of an average for each precision and each kind of parameters."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = (
        [f"`{precision}`", *(str(bytes_of_average(dtype, precision)) for dtype in DTYPES)]
        for precision in PRECISIONS
    )
    return table(["`precision`", *names], lines)


def sizes() -> str:
    """Return what one rank of each number of ranks holds and sends."""
    units = decoder()
    whole = sum(unit.numel for unit in units)
    layers = tensor_parallel(2 * LAYERS, TOKENS, WIDTH, torch.bfloat16)
    lines = []
    for ranks in RANKS:
        here = sum(unit.shard(ranks) for unit in units)
        cells: list[float] = [memory(here, averages=count).total for count in (0, 1, 3)]
        cells += [fsdp(units, ranks, torch.bfloat16).sent(ranks), ddp(units).sent(ranks)]
        # No more ranks than heads of keys and values can have a part of a layer.
        cells += [layers.sent(ranks)] if ranks <= KEY_HEADS and KEY_HEADS % ranks == 0 else []
        texts = [*map(gigabytes, cells), ""]
        lines.append([f"{ranks:,}", *texts[: len(HEADER) - 1]])
    copies = [gigabytes(memory(whole, averages=averages).total) for averages in (0, 1, 3)]
    return (
        f"{table(HEADER, iter(lines))}\n\n"
        f"With DDP each rank holds {copies[0]}, {copies[1]} and {copies[2]} GB, however many there are."
    )


def replace(text: str, name: str, content: str) -> str:
    """Put the content between the two marks of that name."""
    start, end = (mark.format(name=name) for mark in MARKS)
    before, starts, rest = text.partition(start)
    _, ends, after = rest.partition(end)
    if not (starts and ends):
        raise ValueError(f"{PAGE.name} has no marks {name!r}")
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def render() -> str:
    """Return the page with the tables as they are now."""
    text = PAGE.read_text(encoding="utf-8")
    return replace(replace(text, "precisions", precisions()), "sizes", sizes())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
