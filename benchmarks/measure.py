"""Interleaved timing: the arms of a row run in one process, on one thread, in random order."""

import gc
import random
import statistics
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, Final

import torch


SAMPLE_SECONDS: Final = 0.004
WARM_UP_SECONDS: Final = 0.1  # Longer runs fill the caches by themselves.
MIN_ROUNDS: Final = 5
MAX_ROUNDS: Final = 201
NOT_SLOWER: Final = 1.05  # Rows without a budget are judged by it.

# Takes the number of runs; returns the seconds (or bytes) of all runs.
Arm = Callable[[int], float]
# A string in place of an arm is the reason why it is missing.
Arms = Mapping[str, Arm | str]
Found = dict[str, Any]


@dataclass(frozen=True)
class Code:
    """A statement and the names that it uses, timed in CPU seconds of this thread or by a clock."""

    statement: str
    names: Mapping[str, Any]
    clock: Callable[[], float] = time.thread_time

    @cached_property
    def _timer(self) -> timeit.Timer:
        return timeit.Timer(self.statement, timer=self.clock, globals=dict(self.names))

    def __call__(self, number: int) -> float:
        """Run the statement ``number`` times."""
        return self._timer.timeit(number)

    def count_calls(self) -> int:
        """Return how many functions in Python one run calls, which no other process changes."""
        calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        self(1)
        run = compile(self.statement, "statement", "exec")
        names = dict(self.names)
        sys.setprofile(count)
        try:
            exec(run, names)  # noqa: S102 - our own statement
        finally:
            sys.setprofile(None)
        # The frame of the statement.
        return calls - 1


@dataclass(frozen=True)
class Row:
    """One row of the tables, or two: the second one with evicted caches.

    Args:
        name: The operation or the model.
        budget: The largest acceptable ratio; None is shown as a dash.
        arms: Makes what is timed: the base first, then the subject of the budget, then others.
        cold: The budget with evicted caches, None for a dash; False leaves that row out.
        table: ``"operations"``, ``"files"`` or ``"inference"``.
        unit: What the arms return: ``"s"`` or ``"B"``.
    """

    name: str
    budget: float | None
    arms: Callable[[ExitStack], Arms]
    cold: float | bool | None = False
    table: str = "operations"
    unit: str = "s"


def repetitions(arm: Arm) -> int:
    """Return the number of runs per sample that the clock can resolve."""
    number = 1
    while (elapsed := arm(number)) < SAMPLE_SECONDS and number < 10**6:
        number = max(number + 1, int(number * min(10.0, 1.1 * SAMPLE_SECONDS / max(elapsed, 1e-9))))
    return number


def interleaved(
    arms: Mapping[str, Arm],
    seconds: float,
    *,
    cold: bool = False,
    rounds: tuple[int, int] = (MIN_ROUNDS, MAX_ROUNDS),
) -> dict[str, list[float]]:
    """Time all arms for ``seconds``, and return the value of one run for each round.

    A sample with warm caches is a loop of runs after one that is not timed. With ``cold``, it is a
    single run after 64 MB of other data were read and written.
    """
    numbers = {name: repetitions(arm) for name, arm in arms.items()}
    short = {name for name, arm in arms.items() if arm(1) < WARM_UP_SECONDS}
    other_data = torch.zeros(2**24 if cold else 0)
    times: dict[str, list[float]] = {name: [] for name in arms}
    # In a fixed order, each arm would always run with the caches of the same other arm.
    order, names = random.Random(0), list(arms)  # noqa: S311 - not a secret
    end, done = time.monotonic() + seconds, 0
    while done < rounds[0] or (done < rounds[1] and time.monotonic() < end):
        order.shuffle(names)
        for name in names:
            number = 1 if cold else numbers[name]
            if cold:
                other_data.add_(1)
            elif name in short:
                arms[name](1)
            times[name].append(arms[name](number) / number)
        done += 1
    return times


def verdict(ratio: float, low: float, budget: float | None) -> str:
    """Return ``"missed"`` if more than three quarters of the rounds are above the budget."""
    limit = NOT_SLOWER if budget is None else budget
    return "met" if ratio <= limit else "within noise" if low <= limit else "missed"


def measure(row: Row, seconds: float) -> Iterator[Found]:
    """Measure a row for about that long, and for as long with evicted caches."""
    with ExitStack() as stack:
        made = row.arms(stack)
        arms = {name: arm for name, arm in made.items() if not isinstance(arm, str)}
        base, subject, *others = arms
        for cold in (False,) if row.cold is False else (False, True):
            times = interleaved(arms, seconds, cold=cold)
            ratios = {n: [a / b for a, b in zip(times[n], times[base], strict=True)] for n in arms}
            low, ratio, high = statistics.quantiles(ratios[subject], n=4)
            budget = row.cold if cold else row.budget
            yield {
                "name": f"{row.name}, caches evicted" if cold else row.name,
                "table": row.table,
                "budget": budget,
                "ratio": round(ratio, 4),
                "low": round(low, 4),
                "high": round(high, 4),
                "verdict": verdict(ratio, low, budget),
                "base": statistics.median(times[base]),
                "unit": row.unit,
                "rounds": len(times[base]),
                "calls": {n: arm.count_calls() for n, arm in arms.items() if isinstance(arm, Code)},
                "others": {
                    **{name: reason for name, reason in made.items() if isinstance(reason, str)},
                    **{name: round(statistics.median(ratios[name]), 4) for name in others},
                },
            }


@contextmanager
def quiet() -> Generator[Callable[[], object], None, None]:
    """Measure on one thread, without garbage collection and warnings; yield what collects."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Libraries say that TorchScript is deprecated.
            yield gc.collect
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
