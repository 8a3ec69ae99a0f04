"""What is measured: one row for each operation of Module that has a time budget."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import modkit


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


@dataclass(frozen=True)
class Row:
    """One operation.

    Args:
        name: What the table calls it.
        budget: The largest ratio modkit / torch that is acceptable.
        statement: The code that is timed.
        names: Makes the names that the statement uses, from ``torch.nn`` or ``modkit.nn``.
        context: Entered around the timing.
        scope: Entered around the timing with modkit's ``m``; what torch does has no such scope.
    """

    name: str
    budget: float
    statement: str
    names: Callable[[ModuleType], dict[str, Any]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    scope: Callable[[Any], AbstractContextManager[Any]] = nullcontext


def empty(nn: ModuleType) -> dict[str, Any]:
    """Make a module whose forward does nothing, so that only the call itself is timed."""

    class Empty(nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: object) -> object:
            return x

    return {"m": Empty(), "x": torch.zeros(1)}


def hooked(nn: ModuleType) -> dict[str, Any]:
    """Make the empty module with one forward hook that changes nothing."""
    names = empty(nn)
    names["m"].register_forward_hook(lambda module, args, output: None)
    return names


def linear(nn: ModuleType) -> dict[str, Any]:
    """Make one small layer: the smallest real computation."""
    return {"m": nn.Linear(4, 8), "x": torch.zeros(1, 4)}


def small_network(nn: ModuleType) -> dict[str, Any]:
    """Make a network of the size that reinforcement learning steps through one state at a time."""
    model = nn.Sequential()
    for _ in range(20):
        model.extend([nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()])
    return {"m": model, "x": torch.zeros(1, 32)}


def large_network(nn: ModuleType) -> dict[str, Any]:
    """Make a nested network of 496 modules that hold 770 tensors."""

    def block() -> object:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    model = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(55)))
    return {"m": model, "state": model.state_dict(), "dtype": torch.float32}


def siblings(count: int) -> Callable[[ModuleType], dict[str, Any]]:
    """Return a maker of a flat list of layers, as in a mixture of experts or an ensemble."""

    def make(nn: ModuleType) -> dict[str, Any]:
        model = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))
        return {"m": model, "state": model.state_dict()}

    return make


def iterate(method: str) -> str:
    """Return the statement that runs through everything that the method of ``m`` yields."""
    return f"for _ in m.{method}(): pass"


def module_class(nn: ModuleType) -> dict[str, Any]:
    """Give the class itself, for timing its construction."""
    return {"Module": nn.Module}


ROWS = [
    Row("m(x), no hooks, empty forward", 0.60, "m(x)", empty),
    Row("m(x), one forward hook", 0.70, "m(x)", hooked),
    Row("Linear(4, 8)(x)", 0.72, "m(x)", linear, torch.inference_mode),
    Row("20 x (Linear, LayerNorm, ReLU)", 0.75, "m(x)", small_network, torch.inference_mode),
    Row(
        "the same inside fast_attributes",
        0.68,
        "m(x)",
        small_network,
        torch.inference_mode,
        modkit.fast_attributes,
    ),
    Row("m.flag = 1", 0.45, "m.flag = 1", empty),
    Row("Module()", 0.75, "Module()", module_class),
    Row("parameters()", 0.55, iterate("parameters"), large_network),
    Row("modules()", 0.55, iterate("modules"), large_network),
    Row("named_parameters()", 0.75, iterate("named_parameters"), large_network),
    Row("state_dict()", 0.95, "m.state_dict()", large_network),
    Row("load_state_dict(), 770 tensors", 0.20, "m.load_state_dict(state)", large_network),
    Row("load_state_dict(), 3,000 siblings", 0.03, "m.load_state_dict(state)", siblings(3000)),
    Row("train()", 0.30, "m.train()", large_network),
    Row("eval()", 0.30, "m.eval()", large_network),
    Row("float(), nothing to do", 0.30, "m.float()", large_network),
    Row("to(dtype), nothing to do", 0.30, "m.to(dtype)", large_network),
    Row("zero_grad()", 0.55, "m.zero_grad()", large_network),
]

# Loading must stay linear: twice the siblings may take at most this many times as long.
GROWTH_BUDGET = 2.3
GROWTH_ROWS = [
    Row(f"load_state_dict(), {count:,} siblings", 1.0, "m.load_state_dict(state)", siblings(count))
    for count in (3000, 6000)
]
