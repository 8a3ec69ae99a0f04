"""What is measured: one row for each operation that has a budget."""

from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch

import modkit.nn
from modkit.cli import _bench_script
from modkit.cli._averaging_rows import AVERAGING
from modkit.cli._module_rows import MODULE_ROWS, user_model
from modkit.cli._row_kinds import Against, Growth, Import, Memory, Names, Row, Time


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


def large_network(nn: ModuleType) -> Names:
    """Make a nested network of 497 modules that hold 770 tensors."""

    def block() -> object:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    body = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(55)))
    model = user_model(nn, body)
    return {"m": model, "state": model.state_dict(), "dtype": torch.float32}


def siblings(count: int) -> Callable[[ModuleType], Names]:
    """Return a maker of a flat list of layers, as in a mixture of experts or an ensemble."""

    def make(nn: ModuleType) -> Names:
        model = user_model(nn, nn.ModuleList(nn.Linear(1, 1) for _ in range(count)))
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
    Time("m(x), scripted, empty forward", 1.05, "m(x)", _bench_script.compiled),
    Time("m(x), class with a script method", 0.80, "m(x)", _bench_script.class_based),
    Time("m.flag = 1", 0.45, "m.flag = 1", empty),
    Time("Module()", 0.50, "Module()", module_class),
    Time("parameters()", 0.50, iterate("parameters"), large_network),
    Time("modules()", 0.50, iterate("modules"), large_network),
    Time("named_parameters()", 0.70, iterate("named_parameters"), large_network),
    Time("state_dict()", 0.90, "m.state_dict()", large_network),
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
    *MODULE_ROWS,
    *AVERAGING,
    Against(
        "load_state_dict(assign=True) / copying, both modkit",
        1.0,
        LOAD,
        "m.load_state_dict(state, assign=True)",
        lambda: large_network(modkit.nn),
    ),
    Growth(
        "load_state_dict(), 6,000 / 3,000 siblings, both modkit",
        2.3,
        LOAD,
        siblings(3000),
        siblings(6000),
    ),
    Import("import modkit after torch / 60 ms", 0.060, "modkit"),
    # A dict that something has asked for takes 16 bytes more than the values alone.
    Memory("bytes of an empty Module()", 1.05, unused_class),
]
