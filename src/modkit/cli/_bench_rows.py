"""What is measured: one row for each operation that has a budget."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Protocol

import torch

import modkit
import modkit.nn
from modkit.cli import _bench_script
from modkit.cli._measure import Result, compare, timer


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
        scope: Entered around the timing with modkit's ``m``; what torch does has no such scope.
    """

    name: str
    budget: float
    statement: str
    names: Callable[[ModuleType], Names]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    scope: Callable[[Any], AbstractContextManager[Any]] = nullcontext

    def measure(self, seconds: float) -> Result:
        """Time torch and modkit in turns."""
        with self.context():
            base = timer(self.statement, self.names(torch.nn))
            names = self.names(modkit.nn)
            other = timer(self.statement, names)
            with self.scope(names.get("m")):
                return compare(self.name, self.budget, base, other, seconds)


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
        """Time both sizes in turns."""
        small, large = (timer(self.statement, make(modkit.nn)) for make in (self.small, self.large))
        return compare(self.name, self.budget, small, large, seconds)


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


def unused_class(nn: ModuleType) -> type[object]:
    """Derive a class that adds nothing and has no history."""
    return type("Empty", (nn.Module,), {})


def empty(nn: ModuleType) -> Names:
    """Make a module whose forward does nothing, so that only the call itself is timed."""

    class Empty(nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: object) -> object:
            return x

    return {"m": Empty(), "x": torch.zeros(1)}


def ignore(*args: object) -> None:
    """Do nothing, as a hook."""


def hooked(nn: ModuleType) -> Names:
    """Make the empty module with one forward hook that changes nothing."""
    names = empty(nn)
    names["m"].register_forward_hook(ignore)
    return names


def linear(nn: ModuleType) -> Names:
    """Make one small layer: the smallest real computation."""
    return {"m": nn.Linear(4, 8), "x": torch.zeros(1, 4)}


def small_network(nn: ModuleType) -> Names:
    """Make a network of the size that reinforcement learning steps through one state at a time."""
    model = nn.Sequential()
    for _ in range(20):
        model.extend([nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()])
    return {"m": model, "x": torch.zeros(1, 32)}


def large_network(nn: ModuleType) -> Names:
    """Make a nested network of 496 modules that hold 770 tensors."""

    def block() -> object:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    model = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(55)))
    return {"m": model, "state": model.state_dict(), "dtype": torch.float32}


def siblings(count: int) -> Callable[[ModuleType], Names]:
    """Return a maker of a flat list of layers, as in a mixture of experts or an ensemble."""

    def make(nn: ModuleType) -> Names:
        model = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))
        return {"m": model, "state": model.state_dict()}

    return make


def module_class(nn: ModuleType) -> Names:
    """Give the class itself, for timing its construction."""
    return {"Module": nn.Module}


def iterate(method: str) -> str:
    """Return the statement that runs through everything that the method of ``m`` yields."""
    return f"for _ in m.{method}(): pass"


LOAD: Final = "m.load_state_dict(state)"

TIMES: Final = [
    Time("m(x), no hooks, empty forward", 0.60, "m(x)", empty),
    Time("m(x), one forward hook", 0.70, "m(x)", hooked),
    Time("Linear(4, 8)(x)", 0.72, "m(x)", linear, torch.inference_mode),
    Time("20 x (Linear, LayerNorm, ReLU)", 0.75, "m(x)", small_network, torch.inference_mode),
    Time(
        "20 x (Linear, LayerNorm, ReLU), fast_attributes",
        0.68,
        "m(x)",
        small_network,
        torch.inference_mode,
        modkit.fast_attributes,
    ),
    Time("m(x), scripted, empty forward", 1.05, "m(x)", _bench_script.compiled),
    Time("m(x), class with a script method", 0.80, "m(x)", _bench_script.class_based),
    Time("m.flag = 1", 0.45, "m.flag = 1", empty),
    Time("Module()", 0.75, "Module()", module_class),
    Time("parameters()", 0.55, iterate("parameters"), large_network),
    Time("modules()", 0.55, iterate("modules"), large_network),
    Time("named_parameters()", 0.75, iterate("named_parameters"), large_network),
    Time("state_dict()", 0.95, "m.state_dict()", large_network),
    Time("load_state_dict(), 770 tensors", 0.20, LOAD, large_network),
    Time("load_state_dict(), 3,000 siblings", 0.03, LOAD, siblings(3000)),
    Time("train()", 0.30, "m.train()", large_network),
    Time("eval()", 0.30, "m.eval()", large_network),
    Time("float(), nothing to do", 0.30, "m.float()", large_network),
    Time("to(dtype), nothing to do", 0.30, "m.to(dtype)", large_network),
    Time("zero_grad()", 0.55, "m.zero_grad()", large_network),
]

ROWS: Final[list[Row]] = [
    *TIMES,
    Growth(
        "load_state_dict(), 6,000 / 3,000 siblings, both modkit",
        2.3,
        LOAD,
        siblings(3000),
        siblings(6000),
    ),
    Memory("bytes of an empty Module()", 1.0, unused_class),
]
