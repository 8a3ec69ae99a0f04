"""Measure how long modkit takes relative to torch, and hold it against the budgets.

    python benchmarks/ratios.py                  # print the table
    python benchmarks/ratios.py --only load      # only the rows whose name contains the word
    python benchmarks/ratios.py --check          # exit with 1 where a budget is missed

Both run in this process, in turns, so that whatever else the machine does meets both alike. A round
times one, then the other (the order alternates) and gives one ratio; the table shows the median of
the ratios and the middle half of them. What is counted is the time that the one thread spends on the
processor, not the clock on the wall. Absolute times are shown for orientation only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import timeit
from dataclasses import dataclass
from typing import Any

import torch
from rows import GROWTH_BUDGET, GROWTH_ROWS, ROWS, Row

import modkit.nn


SAMPLE_SECONDS = 0.004
MIN_ROUNDS = 5
MAX_ROUNDS = 201


@dataclass(frozen=True)
class Result:
    """The outcome of one row: ratios are modkit / torch, times are seconds for one operation."""

    name: str
    budget: float
    ratio: float
    low: float
    high: float
    torch_time: float

    @property
    def verdict(self) -> str:
        """Say whether the budget is met."""
        return "met" if self.ratio <= self.budget else "missed"


def timer(statement: str, names: dict[str, Any]) -> timeit.Timer:
    """Prepare a statement for timing."""
    return timeit.Timer(statement, globals=names, timer=time.thread_time)


def repetitions(base: timeit.Timer) -> int:
    """Return how often to repeat the statement so that one sample is long enough to be timed."""
    number = 1
    while (elapsed := base.timeit(number)) < SAMPLE_SECONDS and number < 10**6:
        number = max(number + 1, int(number * min(10.0, 1.1 * SAMPLE_SECONDS / max(elapsed, 1e-9))))
    return number


def compare(row: Row, base: timeit.Timer, other: timeit.Timer, seconds: float) -> Result:
    """Time two statements in turns for about that many seconds."""
    number = repetitions(base)
    estimate = base.timeit(number) + other.timeit(number)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / estimate)))
    base_times, ratios = [], []
    for turn in range(rounds):
        if turn % 2:
            other_time, base_time = other.timeit(number), base.timeit(number)
        else:
            base_time, other_time = base.timeit(number), other.timeit(number)
        base_times.append(base_time / number)
        ratios.append(other_time / base_time)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Result(row.name, row.budget, middle, low, high, statistics.median(base_times))


def measure(row: Row, seconds: float) -> Result:
    """Compare modkit with torch in one operation."""
    with row.context():
        base = timer(row.statement, row.names(torch.nn))
        names = row.names(modkit.nn)
        other = timer(row.statement, names)
        with row.scope(names.get("m")):
            return compare(row, base, other, seconds)


def growth(seconds: float) -> Result:
    """Compare modkit with itself on twice the size."""
    small, large = (timer(row.statement, row.names(modkit.nn)) for row in GROWTH_ROWS)
    name = "the same, 6,000 / 3,000 siblings, modkit only"
    return compare(Row(name, GROWTH_BUDGET, "", dict), small, large, seconds)


def show(seconds: float) -> str:
    """Write a time with a unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def line(*cells: str) -> str:
    """Lay out one line of the table."""
    name, *rest = cells
    return f"{name:<46}" + "".join(f"{cell:>14}" for cell in rest)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name contains it")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row")
    parser.add_argument("--check", action="store_true", help="fail where a budget is missed")
    options = parser.parse_args()

    torch.set_num_threads(1)
    gc.disable()
    results = []
    print(line("operation", "torch", "budget", "ratio", "middle half", "verdict"))
    measurements = [(row.name, row) for row in ROWS] + [("load_state_dict() growth", None)]
    for name, row in measurements:
        if options.only not in name:
            continue
        result = measure(row, options.seconds) if row else growth(options.seconds)
        results.append(result)
        figures = (f"{result.budget:.2f}", f"{result.ratio:.3f}")
        spread = f"{result.low:.3f}-{result.high:.3f}"
        print(line(result.name, show(result.torch_time), *figures, spread, result.verdict))
        gc.collect()
    missed = sum(result.verdict == "missed" for result in results)
    print(f"{len(results) - missed} of {len(results)} budgets met, torch {torch.__version__}")
    return int(options.check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
