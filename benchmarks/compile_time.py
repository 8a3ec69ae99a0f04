"""Measure how long dynamo takes to compile a network of modkit relative to one of torch.

    python -m benchmarks.compile_time                 # print times and ratio
    python -m benchmarks.compile_time --blocks 20     # a smaller network
    python -m benchmarks.compile_time --profile       # print where the time goes, for both

A network is a row of residual blocks of Linear, LayerNorm and ReLU. It is compiled for the backend
"eager", so what is timed is the capture of the graph and the guards, which is all that depends on how
modules are written. Both are compiled in this process, interleaved, each from a fresh state of dynamo. Times
are CPU times of one thread; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import torch

import modkit.nn
from benchmarks.measure import Code, interleaved, quiet


if TYPE_CHECKING:
    from collections.abc import Callable


BUDGET = 1.02
WIDTH = 32


def build(nn: ModuleType, blocks: int) -> torch.nn.Module:
    """Build the network on one of the two libraries."""

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.act = (
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.ReLU(),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.act(self.norm(self.linear(x)))
            return out

    net: torch.nn.Module = nn.Sequential(*(Block() for _ in range(blocks)))
    return net


def first_call(net: torch.nn.Module) -> Callable[[], None]:
    """Return a function that compiles a network by calling it once."""

    def run() -> None:
        torch.compiler.reset()
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        compiled(torch.ones(1, WIDTH))

    return run


def profile(run: Callable[[], None], title: str) -> None:
    """Print the functions that take the most time of their own."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    print(title)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--check", action="store_true", help="fail where the budget is missed")
    options = parser.parse_args()

    torch.set_num_threads(1)
    base, other = (first_call(build(nn, options.blocks)) for nn in (torch.nn, modkit.nn))
    # The first compilation of all imports what dynamo needs.
    base()
    other()
    if options.profile:
        profile(base, "torch")
        profile(other, "modkit")
        return 0
    arms = {name: Code("run()", {"run": run}) for name, run in (("torch", base), ("modkit", other))}
    with quiet():
        times = interleaved(arms, 0, rounds=(options.rounds, options.rounds))
    ratios = [ours / theirs for ours, theirs in zip(times["modkit"], times["torch"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    verdict = "met" if ratio <= BUDGET else "missed"
    print(f"{options.blocks} blocks, torch {torch.__version__}, {options.rounds} rounds")
    print(f"torch   {statistics.median(times['torch']):.3f} s")
    print(f"modkit  {statistics.median(times['modkit']):.3f} s")
    print(f"ratio   {ratio:.3f} ({low:.3f}-{high:.3f}), budget {BUDGET:.2f}: {verdict}")
    return int(options.check and verdict == "missed")


if __name__ == "__main__":
    sys.exit(main())
