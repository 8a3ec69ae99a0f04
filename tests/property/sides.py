"""One implementation's half of a lockstep run, and the run itself."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything
from tests.property import known
from tests.property.node_tools import LOG, plain_text
from tests.property.observation import Glances, distinct_modules, observe
from tests.property.operations import OPERATIONS, Kind, Operation, Skipped
from tests.property.trees import LAYERS, Builder, ModuleSpec
from tests.property.worlds import World


@dataclass
class Side:
    """A tree on one implementation, with the handles of the hooks registered so far."""

    operations: ClassVar[dict[str, Kind]] = OPERATIONS
    impl: Implementation
    spec: ModuleSpec
    model: Any = field(init=False)
    handles: list[Any] = field(default_factory=list)
    world: World = field(default_factory=World)
    # Averages of the tree, and those that are swapped into it.
    averages: list[Any] = field(default_factory=list)
    ema: Any = None
    applied: list[Any] = field(default_factory=list)
    # Trees that a shallow copy has replaced.
    originals: list[Any] = field(default_factory=list)
    shape: tuple[int, ...] = (2, 3)

    def __post_init__(self) -> None:
        seed_everything()
        with self.world.entered(self):
            self.model = Builder(self.impl).module(self.spec)
        self.glances = Glances()

    def build(self, number: int) -> torch.nn.Module:
        """Build one of the layers that fit into the tree."""
        return Builder(self.impl).module(ModuleSpec(LAYERS[number % len(LAYERS)]))  # type: ignore[no-any-return]

    def target(self, number: int) -> Any:
        """Return the module with the number, counted round the tree's modules."""
        found = distinct_modules(self.model)
        return found[number % len(found)]

    def run(self, operation: Operation) -> tuple[Any, ...]:
        """Run one operation; return its outcome, its warnings and what the hooks logged."""
        seed_everything()
        LOG.clear()
        with warnings.catch_warnings(record=True) as caught, self.world.entered(self):
            warnings.simplefilter("always")
            try:
                value = self.operations[operation.kind].run(self, operation)
                result: tuple[Any, ...] = ("returned", freeze(value))
            except Skipped:
                result = ("skipped",)
            except Exception as error:
                result = ("raised", type(error).__name__, plain_text(error))
        return result, [(w.category.__name__, plain_text(w.message)) for w in caught], [*LOG]


@dataclass
class Run:
    """A sequence of operations on both implementations, and its outcome."""

    spec: ModuleSpec
    # After how many operations everything is compared; after the others a glance must do.
    every: int = 1
    done: int = 0
    skipped: int = 0
    refusals: int = 0
    kinds: list[str] = field(default_factory=list)
    # How often each listed difference explained an outcome.
    explained: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sides = [Side(impl, self.spec) for impl in (TORCH, MODKIT)]
        self.compare_trees("build")

    def compare_trees(self, step: object) -> None:
        """Assert that everything observable of the trees is equal."""
        compare(step, [observe(side.model) for side in self.sides])

    def step(self, operation: Operation) -> None:
        """Run the operation on both sides, and compare everything observable."""
        outcomes = [side.run(operation) for side in self.sides]
        self.done += 1
        if outcomes[0][0] == ("skipped",):
            self.skipped += 1
        else:
            self.kinds.append(operation.kind)
        if outcomes[0] != outcomes[1]:
            row = known.explain(operation, *self.sides, *outcomes)
            if row is None:
                compare(operation, outcomes)
            else:
                self.explained.append(row)
        if self.done % self.every == 0:
            self.compare_trees(operation)
        else:
            compare(operation, [side.glances.of(side.model) for side in self.sides])


@contextmanager
def reproducible() -> Iterator[None]:
    """Switch off what makes two equal runs differ."""
    torch_always_warns = torch.is_warn_always_enabled()
    collects = gc.isenabled()
    torch.set_warn_always(True)
    # Uninitialized memory, as of a lazy layer that fails to initialize, is compared too.
    torch.use_deterministic_algorithms(True)
    # A hook that is bound to a module notices when the collector frees the module.
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        torch.use_deterministic_algorithms(False)
        torch.set_warn_always(torch_always_warns)


def lockstep(spec: ModuleSpec, operations: list[Operation], every: int = 1) -> Run:
    """Run the operations on both implementations, and compare everything observable after each."""
    with reproducible():
        run = Run(spec, every)
        for operation in [*operations]:
            run.step(operation)
        for operation in closing(run.sides[0]):
            run.step(operation)
        run.compare_trees("end")
        return run


def closing(side: Side) -> list[Operation]:
    """Return the operations that undo lasting effects."""
    return [Operation("leave_average", 0, ()) for _ in side.applied]


class Difference(AssertionError):
    """Torch and modkit differ."""


def compare(step: object, pair: list[Any], what: str = "torch and modkit differ after") -> None:
    """Assert that both sides are equal; the message names the step."""
    if pair[0] != pair[1]:
        raise Difference(f"{what} {step}\n{'; '.join(first_difference(*pair))}")


def first_difference(expected: Any, found: Any) -> list[str]:
    """Return the path to the first difference of two values, and both values there."""
    for index in both_keys(expected, found):
        if expected[index] != found[index]:
            return [repr(index), *first_difference(expected[index], found[index])]
    if isinstance(expected, list) and isinstance(found, list):
        more = [item for item in expected if item not in found]
        less = [item for item in found if item not in expected]
        counts = f"{len(expected)} and {len(found)} items"
        return [counts, f"only first {more!r:.900}", f"only second {less!r:.900}"]
    return [f"first {expected!r:.900}", f"second {found!r:.900}"]


def both_keys(expected: Any, found: Any) -> Any:
    """Return the keys or indices of two containers that have the same."""
    if type(expected) is type(found) and isinstance(expected, (dict, list, tuple)):
        if isinstance(expected, dict):
            return expected if expected.keys() == found.keys() else ()
        return range(len(expected)) if len(expected) == len(found) else ()
    return ()
