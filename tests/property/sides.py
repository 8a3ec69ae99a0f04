"""The two sides of a lockstep with the global state of each, what is compared, and listed differences."""

import functools
import gc
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.nn.modules.module as torch_module
from torch.utils.hooks import RemovableHandle as HookIds

from modkit._messages import MSG_CYCLE
from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything
from tests.property.classes import LOG, Lora, Plain, plain_text, summary
from tests.property.observation import Glances, distinct_modules, observe
from tests.property.operations import OPERATIONS, Kind, Operation, Skipped
from tests.property.trees import LAYERS, Builder, ModuleSpec


TABLES: Final = {
    name: table
    for name, table in vars(torch_module).items()
    if name.startswith("_global_") and isinstance(table, dict)
}
# The functions of `torch.nn.Module`, any of which a library may replace.
METHODS: Final = tuple(
    name
    for name, value in vars(torch.nn.Module).items()
    if isinstance(inspect.unwrap(value) if callable(value) else value, types.FunctionType)
)
SIGNATURES: Final = {name: inspect.signature(vars(torch.nn.Module)[name]) for name in METHODS}


# Classes that can be patched, beside those of `torch.nn` and of the trees.
OTHERS: Final = {"TorchModule": torch.nn.Module, "Lora": Lora, "Plain": Plain}


class World:
    """The global hook tables and the patches of one side, active while it runs an operation."""

    def __init__(self) -> None:
        self.patches: list[str] = []
        self._hooks: dict[str, list[tuple[int, Any]]] = {}
        # Tables that an operation has substituted for torch's.
        self._tables: dict[str, Any] = {}
        self._full: bool | None = None
        # Hooks are told apart by a number that the process counts.
        self._next_hook_id = 0

    @contextmanager
    def entered(self, side: Any) -> Iterator[None]:
        """Install the tables and patches, and remove them on exit."""
        next_hook_id = HookIds.next_id
        HookIds.next_id = self._next_hook_id
        torch_module._global_is_full_backward_hook = self._full
        for name, hooks in self._hooks.items():
            TABLES[name].update(hooks)
        for name, table in self._tables.items():
            setattr(torch_module, name, table)
        try:
            with ExitStack() as stack:
                for dotted in self.patches:
                    stack.enter_context(patched(side, dotted))
                yield
        finally:
            self._next_hook_id = HookIds.next_id
            HookIds.next_id = next_hook_id
            self._full = torch_module._global_is_full_backward_hook
            torch_module._global_is_full_backward_hook = None
            self._hooks, self._tables = {}, {}
            for name, original in TABLES.items():
                table = getattr(torch_module, name)
                if table is not original:
                    self._tables[name] = table
                    setattr(torch_module, name, original)
                if original:
                    self._hooks[name] = list(original.items())
                    original.clear()


def home_of(side: Any, name: str) -> Any:
    """Return the owner of the function: `torch.nn.functional`, a layer's class or a user's."""
    from tests.property import nodes_modkit, nodes_torch

    if name == "F":
        return torch.nn.functional
    if name in OTHERS:
        return OTHERS[name]
    nodes = {"torch": nodes_torch, "modkit": nodes_modkit}[side.impl.name]
    return getattr(nodes, name, None) or getattr(torch.nn, name)


@contextmanager
def patched(side: Any, dotted: str) -> Iterator[None]:
    """Replace a function by one that logs its calls."""
    home_name, _, name = dotted.partition(".")
    home = home_of(side, home_name)
    static = inspect.getattr_static(home, name)
    own = name in vars(home)
    if home_name == "TorchModule":
        replacement = noting_arguments(name, static)
    else:
        replacement = noting_calls(dotted, getattr(home, name))
    setattr(home, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(home, name, static)
        else:
            delattr(home, name)


def noting_calls(dotted: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that logs its calls and doubles the result."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        LOG.append(("patched", dotted, len(args), sorted(kwargs)))
        output = original(*args, **kwargs)
        return output * 2 if isinstance(output, torch.Tensor) else output

    return noting


def noting_arguments(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that logs its arguments, positional or keyword."""
    bind = SIGNATURES[name].bind

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        bound = bind(*args, **kwargs)
        bound.apply_defaults()
        owner, *others = bound.arguments.values()
        LOG.append((name, type(owner).__name__, [summary(value) for value in others]))
        return original(*args, **kwargs)

    return noting


Outcome = tuple[Any, ...]
Match = Callable[[Operation, Any, Any, Outcome, Outcome], bool]


def contains_itself(
    operation: Operation, torch_side: Any, modkit_side: Any, theirs: Outcome, ours: Outcome
) -> bool:
    """Torch exceeds Python's recursion limit, and modkit names a module of the tree."""
    names = {type(module).__name__ for module in torch_side.model.modules()}
    expected = {("raised", "RecursionError", MSG_CYCLE.format(name=name)) for name in names}
    return (
        operation.kind == "in_cycle"
        and theirs[0] == ("raised", "RecursionError", "maximum recursion depth exceeded")
        and ours[0] in expected
        and theirs[1:] == ours[1:]
    )


def unhashable(
    operation: Operation, torch_side: Any, modkit_side: Any, theirs: Outcome, ours: Outcome
) -> bool:
    """Modkit compares modules by identity; torch raises, or treats two equal modules as one."""
    if operation.kind != "among_data_classes":
        return False
    kind, width, method, _ = operation.arguments
    unhashable_type = "unhashable type: 'Data'"
    if method == "children":
        return False  # torch's own
    if kind == "eq":
        # Python 3.14 puts "cannot use ... as a set element" around it.
        refused = theirs[0][:2] == ("raised", "TypeError") and unhashable_type in theirs[0][2]
    else:
        refused = kind == "hash" and width == 1
    by_identity = Operation(operation.kind, operation.target, (kind, width, method, True))
    return refused and torch_side.run(by_identity) == ours


# By row of the table of differences: whether it explains a pair of outcomes of an operation.
ROWS: Final[dict[str, Match]] = {
    "tests/parity/fixes/test_cycles.py::test_a_cycle_is_an_error_that_names_the_module": (
        contains_itself
    ),
    "tests/parity/fixes/test_hashing.py::test_modules_that_cannot_be_hashed_are_walked": unhashable,
}


def explain(
    operation: Operation, torch_side: Any, modkit_side: Any, theirs: Outcome, ours: Outcome
) -> str | None:
    """Return the row that says why the outcomes of an operation differ, or None."""
    for row, matches in ROWS.items():
        if matches(operation, torch_side, modkit_side, theirs, ours):
            return row
    return None


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
            row = explain(operation, *self.sides, *outcomes)
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
