"""Timing two things in turns, in one process.

Whatever else the machine does meets both alike: a round times one, then the other (the order
alternates), and gives one ratio. What is counted is the time that the one thread spends on the
processor, not the clock on the wall.
"""

import gc
import math
import statistics
import time
import timeit
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch


SAMPLE_SECONDS: Final = 0.004
# The longest sample of the slower statement, so that the faster one has long samples too.
LONG_SAMPLE_SECONDS: Final = 0.05
MIN_ROUNDS: Final = 5
MAX_ROUNDS: Final = 201

Verdict = Literal["met", "within noise", "missed"]


@dataclass(frozen=True)
class Result:
    """What came of one row of the table.

    Args:
        name: What the table calls the row.
        budget: The largest acceptable ratio.
        ratio: The median of the ratios modkit / torch, one a round.
        low: The lower quartile of the ratios.
        high: Their upper quartile.
        base: What torch needs for one operation, for orientation: the median.
        unit: The unit of ``base``: seconds or bytes.
        rounds: How many ratios there are.
    """

    name: str
    budget: float
    ratio: float
    low: float
    high: float
    base: float
    unit: Literal["s", "B"]
    rounds: int

    @property
    def verdict(self) -> Verdict:
        """Hold the ratio against the budget.

        The noise is what lies between the median and the quartile below it: a budget is missed
        when more than three quarters of the rounds are above it. Where the median is above it
        and the quartile is not, the measurement cannot tell.
        """
        if self.ratio <= self.budget:
            return "met"
        return "within noise" if self.low <= self.budget else "missed"


def timer(statement: str, names: dict[str, Any]) -> timeit.Timer:
    """Prepare a statement for timing."""
    return timeit.Timer(statement, globals=names, timer=time.thread_time)


def repetitions(subject: timeit.Timer) -> int:
    """Return how often to repeat a statement so that one sample is long enough to be timed."""
    number = 1
    while (elapsed := subject.timeit(number)) < SAMPLE_SECONDS and number < 10**6:
        number = max(number + 1, int(number * min(10.0, 1.1 * SAMPLE_SECONDS / max(elapsed, 1e-9))))
    return number


def compare(
    name: str, budget: float, base: timeit.Timer, other: timeit.Timer, seconds: float
) -> Result:
    """Time two statements in turns for about that many seconds, and for five rounds at least."""
    number = repetitions(base)
    affordable = int(number * LONG_SAMPLE_SECONDS / max(base.timeit(number), 1e-9))
    number = max(number, min(affordable, repetitions(other)))
    estimate = base.timeit(number) + other.timeit(number)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / estimate)))
    base_times: list[float] = []
    ratios: list[float] = []
    for turn in range(rounds):
        if turn % 2:
            other_time, base_time = other.timeit(number), base.timeit(number)
        else:
            base_time, other_time = base.timeit(number), other.timeit(number)
        base_times.append(base_time / number)
        ratios.append(other_time / base_time)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Result(name, budget, middle, low, high, statistics.median(base_times), "s", rounds)


def repeat(subject: timeit.Timer, seconds: float) -> list[float]:
    """Time a statement for about that many seconds; return the seconds of one run, five at least."""
    number = repetitions(subject)
    rounds = int(seconds / subject.timeit(number))
    times = range(max(MIN_ROUNDS, min(MAX_ROUNDS, rounds)))
    return [subject.timeit(number) / number for _ in times]


def exponent(sizes: list[int], times: list[float]) -> float:
    """Return the slope of the straight line through the logarithms: 1 is linear, 2 quadratic."""
    logarithms = [[math.log(value) for value in values] for values in (sizes, times)]
    return statistics.linear_regression(*logarithms).slope


@contextmanager
def quiet() -> Generator[Callable[[], object], None, None]:
    """Measure with one thread and without garbage collection; yield what collects in between."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield gc.collect
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
