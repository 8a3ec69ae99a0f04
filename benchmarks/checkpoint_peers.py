"""Time the reading and writing of files: modkit compared with torch and safetensors.

    python -m benchmarks.checkpoint_peers                                    # print the table
    python -m benchmarks.checkpoint_peers --seconds 0.2 --divide 100         # check that it runs

All run in this process, interleaved: a round times each contestant once, in random order. A time is the wall
time of one call, with the file in the page cache. A ratio is the median over the rounds of the time divided by
that of ``torch.load`` or ``torch.save`` in the same round. With ``mmap=True`` the bytes of tensors are read
when they are used: of torch, that is later; modkit verifies their checksums at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import modkit
from benchmarks.measure import Code, interleaved
from modkit import jit


class Case(NamedTuple):
    """One comparison: the contestants by name, and the name of the baseline."""

    name: str
    contestants: Mapping[str, Callable[[], object]]
    reference: str


class Unit(nn.Module):
    """Six modules with ten tensors, one of which is a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.drop, self.act = nn.Dropout(), nn.ReLU()


CONTENTS: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "5,460 small tensors": lambda n: nn.ModuleList(Unit() for _ in range(546 // n)).state_dict(),
    "100 tensors of 4 MB": lambda n: {f"{i}.weight": torch.rand(2**20 // n) for i in range(100)},
    "a tensor of 1 GB": lambda n: {"weight": torch.rand(2**28 // n)},
}
SCRIPT = "a TorchScript archive of 200 MB"


def cases_of(name: str, folder: Path, divide: int) -> list[Case]:
    """Write the files of one model, and return the cases that read them."""
    torch_file, safe_file, new = folder / "a.pt", folder / "a.safetensors", folder / "new"
    content = CONTENTS[name](divide)
    torch.save(content, torch_file)
    save_file(content, safe_file)
    reading = {
        "torch.load": partial(torch.load, torch_file, weights_only=True),
        "torch.load(mmap=True)": partial(torch.load, torch_file, weights_only=True, mmap=True),
        "safetensors.torch.load_file": partial(load_file, safe_file),
        "modkit.load_checkpoint": partial(modkit.load_checkpoint, torch_file),
        "modkit.load_checkpoint(mmap=True)": partial(modkit.load_checkpoint, torch_file, mmap=True),
    }
    writing = {
        "torch.save": partial(torch.save, content, new),
        "safetensors.torch.save_file": partial(save_file, content, new),
        "modkit.save_checkpoint": partial(modkit.save_checkpoint, content, new),
    }
    return [
        Case(f"read {name}", reading, "torch.load"),
        Case(f"write {name}", writing, "torch.save"),
    ]


def script_case(name: str, folder: Path, divide: int) -> list[Case]:
    """Return the readers of a TorchScript archive of 200 MB."""
    path = folder / "script.pt"
    layers = [nn.Linear(1024, 1024 // divide) for _ in range(50)]
    torch.jit.save(torch.jit.script(nn.ModuleList(layers).eval()), path)
    readers = {
        "torch.jit.load": partial(torch.jit.load, path),
        "modkit.jit.load": partial(jit.load, path),
    }
    return [Case(f"read {name}", readers, "torch.jit.load")]


def measure(case: Case, seconds: float) -> list[tuple[str, list[float], float]]:
    """Return the name, the times and the ratio of each contestant."""
    # The result of a call is freed after its time was taken.
    arms = {
        name: Code("found = call()", {"call": call}, time.perf_counter)
        for name, call in case.contestants.items()
    }
    found = interleaved(arms, seconds).items()
    times = {name: [1e3 * time for time in values] for name, values in found}
    pairs = {name: zip(found, times[case.reference], strict=True) for name, found in times.items()}
    return [(n, times[n], statistics.median(a / b for a, b in pairs[n])) for n in case.contestants]


def row(case: Case, name: str, times: list[float], ratio: float) -> str:
    """Return a row of the table, with the median and the quartiles."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return f"| {case.name} | {name} | {middle:,.1f} [{low:,.1f}, {high:,.1f}] | {ratio:.2f} |"


def main() -> int:
    """Measure, and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="time for each group of rows")
    parser.add_argument("--divide", type=int, default=1, help="divide the sizes, for a check")
    parser.add_argument("--only", default="", help="a part of the names of the files to measure")
    parser.add_argument("--folder", type=Path, help="where the files are written, for 3 GB")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores\n")
    print("| case | what | ms [quartiles] | ratio |\n|---|---|---|---|")
    for content in (content for content in (*CONTENTS, SCRIPT) if options.only in content):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            make = script_case if content == SCRIPT else cases_of
            for case in make(content, Path(folder), options.divide):
                for found in measure(case, options.seconds):
                    print(row(case, *found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
