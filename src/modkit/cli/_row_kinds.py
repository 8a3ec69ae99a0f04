"""What kinds of rows the benchmark has."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

import modkit.nn
from modkit.cli._measure import MIN_ROUNDS, Result, compare, repeat, timer


Names = dict[str, Any]


class Row(Protocol):
    """One row of the table."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        ...

    @property
    def budget(self) -> float:
        """The largest acceptable ratio."""
        ...

    def measure(self, seconds: float) -> Result:
        """Measure it for about that long."""
        ...


@dataclass(frozen=True)
class Time:
    """The time of an operation, relative to torch.

    Args:
        name: What the table calls it.
        budget: The largest acceptable ratio modkit / torch.
        statement: The code that is timed.
        names: Makes the names that the statement uses, from ``torch.nn`` or ``modkit.nn``.
        context: Entered around the timing.
    """

    name: str
    budget: float
    statement: str
    names: Callable[[ModuleType], Names]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def measure(self, seconds: float) -> Result:
        """Time torch and modkit, interleaved."""
        with self.context():
            base = timer(self.statement, self.names(torch.nn))
            other = timer(self.statement, self.names(modkit.nn))
            return compare(self.name, self.budget, base, other, seconds)


@dataclass(frozen=True)
class Cold:
    """The time of an operation relative to torch, with the caches of the processor evicted before it.

    Args:
        name: What the table calls it.
        budget: The largest acceptable ratio modkit / torch.
        statement: The code that is timed.
        names: Makes the names that the statement uses, from ``torch.nn`` or ``modkit.nn``.
    """

    name: str
    budget: float
    statement: str
    names: Callable[[ModuleType], Names]

    def measure(self, seconds: float) -> Result:
        """Time torch and modkit interleaved, each once after the caches were filled with other data."""
        timers = [timer(self.statement, self.names(nn)) for nn in (torch.nn, modkit.nn)]
        other_data = torch.zeros(16 * 1024 * 1024)
        bases: list[float] = []
        ratios: list[float] = []
        end = time.monotonic() + seconds
        while len(ratios) < MIN_ROUNDS or time.monotonic() < end:
            times: list[float] = []
            for subject in timers:
                other_data.add_(1)
                times.append(subject.timeit(1))
            bases.append(times[0])
            ratios.append(times[1] / times[0])
        low, middle, high = statistics.quantiles(ratios, n=4)
        base = statistics.median(bases)
        return Result(self.name, self.budget, middle, low, high, base, "s", len(ratios))


@dataclass(frozen=True)
class Growth:
    """The time of an operation of modkit, relative to the same with fewer modules.

    Args:
        name: What the table calls it.
        budget: The largest acceptable ratio.
        statement: The code that is timed.
        small: Makes the names that the statement uses.
        large: Makes them for the greater size.
    """

    name: str
    budget: float
    statement: str
    small: Callable[[ModuleType], Names]
    large: Callable[[ModuleType], Names]

    def measure(self, seconds: float) -> Result:
        """Time both sizes, interleaved."""
        small, large = (timer(self.statement, make(modkit.nn)) for make in (self.small, self.large))
        return compare(self.name, self.budget, small, large, seconds)


@dataclass(frozen=True)
class Against:
    """The time of an operation of modkit, relative to something that torch has no name for.

    Args:
        name: What the table calls it.
        budget: The largest acceptable ratio.
        base: The code that is the measure.
        statement: The code that is held against it.
        names: Makes the names that both use.
    """

    name: str
    budget: float
    base: str
    statement: str
    names: Callable[[], Names]

    def measure(self, seconds: float) -> Result:
        """Time both, interleaved."""
        names = self.names()
        base, other = timer(self.base, names), timer(self.statement, names)
        return compare(self.name, self.budget, base, other, seconds)


@dataclass(frozen=True)
class Limit:
    """The time of an operation of modkit, relative to a time that it may take.

    Args:
        name: What the table calls it.
        limit: That time, in seconds.
        statement: The code that is timed.
        names: Makes the names that the statement uses.
    """

    name: str
    limit: float
    statement: str
    names: Callable[[], Names]
    budget: float = 1.0

    def measure(self, seconds: float) -> Result:
        """Time it again and again."""
        found = repeat(timer(self.statement, self.names()), seconds)
        low, middle, high = (value / self.limit for value in statistics.quantiles(found, n=4))
        return Result(self.name, 1.0, middle, low, high, self.limit, "s", len(found))


@dataclass(frozen=True)
class Import:
    """The time that an import adds to that of torch, relative to a time that it may take.

    Args:
        name: What the table calls it.
        limit: That time, in seconds.
        module: The name of the module.
    """

    name: str
    limit: float
    module: str
    budget: float = 1.0

    def measure(self, seconds: float) -> Result:
        """Import it in one new process after another."""
        code = (
            "import time, torch; start = time.thread_time(); "
            f"import {self.module}; print(time.thread_time() - start)"
        )
        command = [sys.executable, "-c", code]
        found: list[float] = []
        end = time.monotonic() + seconds
        while len(found) < MIN_ROUNDS or time.monotonic() < end:
            done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
            found.append(float(done.stdout))
        low, middle, high = (value / self.limit for value in statistics.quantiles(found, n=4))
        return Result(self.name, 1.0, middle, low, high, self.limit, "s", len(found))


@dataclass(frozen=True)
class Memory:
    """The bytes of an object, relative to torch.

    Args:
        name: What the table calls it.
        budget: The largest acceptable ratio modkit / torch.
        kind: Makes the class of the object, from ``torch.nn`` or ``modkit.nn``.
    """

    name: str
    budget: float
    kind: Callable[[ModuleType], type[object]]

    def measure(self, seconds: float) -> Result:
        """Add up the sizes; there is nothing to repeat."""
        base, other = (own_bytes(self.kind(nn)) for nn in (torch.nn, modkit.nn))
        ratio = other / base
        return Result(self.name, self.budget, ratio, ratio, ratio, base, "B", 1)


def own_bytes(kind: type[object]) -> int:
    """Return the size of an object of the class with its ``__dict__`` and with what stands in it.

    What other objects of the class refer to as well is no part of it.
    """
    # How Python lays out a ``__dict__`` depends on the objects of the class that came before.
    *_, twin, subject = (kind() for _ in range(10))
    shared = {id(value) for value in vars(twin).values()}
    own = {id(value): value for value in vars(subject).values() if id(value) not in shared}
    return sum(map(sys.getsizeof, [subject, vars(subject), *own.values()]))
