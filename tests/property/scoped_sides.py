"""A tree used outside or inside `modkit.fast_inference`, and both in lockstep."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from tests.helpers import Implementation, seed_everything
from tests.property import (
    operations,
    scoped_operations,
    tree_operations,
)
from tests.property.observation import Ordinals, describe, distinct_modules, observe
from tests.property.operations import OPERATIONS, Kind, Operation
from tests.property.scoped_calls import SCOPED
from tests.property.scoped_trees import IMAGES, VECTORS, ScopedBuilder, Tree
from tests.property.sides import Side, compare, reproducible
from tests.property.trees import ModuleSpec


# The files whose operations are drawn for sequences inside scopes.
FILES: Final = (
    operations,
    scoped_operations,
    tree_operations,
)
HOMES: Final = {file.__name__ for file in FILES}


@dataclass
class ScopedSide(Side):
    """One of two equal trees, used inside or outside scopes."""

    operations: ClassVar[dict[str, Kind]] = {
        **{k: v for k, v in OPERATIONS.items() if v.function.__module__ in HOMES},
        **SCOPED,
    }
    shape: tuple[int, ...] = (2, 3)
    fast: bool = False
    scopes: list[Any] = field(default_factory=list)
    # Every module that was ever in the tree, in the order of first sight.
    known: dict[int, torch.nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed_everything()
        with self.world.entered(self):
            self.model = ScopedBuilder(self.impl).module(self.spec)
        self.note_modules()

    def build(self, number: int) -> torch.nn.Module:
        """Build one of the layers that fit into the tree."""
        kinds = sorted(VECTORS if self.shape == (2, 3) else IMAGES)
        return ScopedBuilder(self.impl).module(ModuleSpec(kinds[number % len(kinds)]))

    def note_modules(self) -> None:
        """Remember the modules that are in the tree now."""
        for module in distinct_modules(self.model):
            self.known.setdefault(id(module), module)

    def run(self, operation: Operation) -> tuple[Any, ...]:
        """Run one operation, and note the modules that it put into the tree."""
        result = super().run(operation)
        self.note_modules()
        return without_addresses(result)

    def seen(self) -> list[Any]:
        """Describe the tree as users see it while a scope may be open."""
        return [self.public(place) for place in observe(self.model)]

    def public(self, place: Any) -> Any:
        """Remove from a description what scopes may add: attributes, and the type of tables."""
        if not isinstance(place, tuple):
            return place
        path, description = place
        tables = [issubclass(table, dict) for table in description["tables"]]
        return path, {**description, "tables": tables}

    def left(self) -> list[Any]:
        """Describe all modules that were ever in the tree, to the names in `__dict__` in order."""
        ordinals = Ordinals()
        return [
            (list(module.__dict__), describe(module, ordinals)) for module in self.known.values()
        ]


def without_addresses(value: Any) -> Any:
    """Replace the addresses in texts, which differ between equal objects."""
    if isinstance(value, str):
        return re.sub(r"0x[0-9a-f]+", "0x", value)
    if isinstance(value, (list, tuple)):
        return type(value)(without_addresses(item) for item in value)
    return value


def only(names: dict[str, Any], attributes: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the attributes with these names, sorted."""
    return sorted((name, repr(value)) for name, value in attributes if name in names)


def comparable(plain: list[Any], fast: list[Any]) -> tuple[list[Any], list[Any]]:
    """Remove attributes that only the fast side has, and the order of attributes."""
    pair: tuple[list[Any], list[Any]] = [], []
    for expected, found in zip(plain, fast, strict=False):
        if not isinstance(expected, tuple) or not isinstance(found, tuple):
            pair[0].append(expected)
            pair[1].append(found)
            continue
        names = dict(expected[1]["attributes"])
        for place, side in zip((expected, found), pair, strict=True):
            attributes = only(names, place[1]["attributes"])
            side.append((place[0], {**place[1], "attributes": attributes}))
    return pair


def is_refusal(outcome: Any) -> bool:
    """Return True if `fast_inference` refused the operation, in its own name."""
    result = outcome[0]
    return result[:2] == ("raised", "RuntimeError") and "fast_inference" in result[2]


def closing(side: ScopedSide) -> list[Operation]:
    """Return the operations that undo patches, swaps and scopes."""
    return [
        *(Operation("patch", 0, (dotted,)) for dotted in list(side.world.patches)),
        *(Operation("leave_average", 0, ()) for _ in side.applied),
        *(Operation("leave_scope", 0, (0, False)) for _ in side.scopes),
    ]


@dataclass
class Lockstep:
    """Two equal trees, and how often an operation ran, computed a result or was refused."""

    plain: ScopedSide
    fast: ScopedSide
    # After how many operations the trees are compared.
    every: int = 1
    done: int = 0
    skipped: int = 0
    refusals: int = 0
    kinds: list[str] = field(default_factory=list)
    explained: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, impls: tuple[Implementation, Implementation], tree: Tree, every: int = 1
    ) -> "Lockstep":
        """Build both trees."""
        plain, fast = (
            ScopedSide(impl, tree.spec, shape=tree.shape, fast=fast)
            for impl, fast in zip(impls, (False, True), strict=True)
        )
        return cls(plain, fast, every)

    def step(self, operation: Operation) -> None:
        """Run the operation on both sides, unless the fast side refuses it."""
        self.done += 1
        whole = self.done % self.every == 0
        before = without_addresses(self.fast.seen()) if whole else None
        outcome = self.fast.run(operation)
        if is_refusal(outcome):
            self.refusals += 1
            after = without_addresses(self.fast.seen()) if whole else None
            assert before == after, f"changed by refused {operation}"
            return
        expected = self.plain.run(operation)
        if expected[0] == ("skipped",):
            self.skipped += 1
        else:
            self.kinds.append(operation.kind)
        pair = [expected, outcome]
        # The number of attribute reads of tensors is not compared.
        pair = [[*result, [e for e in log if not is_read(e)]] for *result, log in pair]
        compare(operation, pair, "plain and fast differ after")
        if whole or operation.kind == "leave_scope":
            self.compare_trees(operation)

    def compare_trees(self, operation: Operation) -> None:
        """Compare everything observable; outside scopes, also leftovers."""
        if not self.fast.scopes:
            compare(operation, [self.plain.left(), self.fast.left()], "left behind after")
        pair = [without_addresses(s) for s in comparable(self.plain.seen(), self.fast.seen())]
        compare(operation, pair, "trees differ after")


def is_read(entry: Any) -> bool:
    """Return True if an entry of the log says that an attribute of a tensor was read."""
    return isinstance(entry, tuple) and entry[1:2] == ("__get__",)


def lockstep(
    impls: tuple[Implementation, Implementation],
    tree: Tree,
    operations: list[Operation],
    every: int = 1,
) -> Lockstep:
    """Run the operations outside and inside scopes, and compare everything observable."""
    last = Operation("end", 0, ())
    with reproducible():
        both = Lockstep.of(impls, tree, every)
        try:
            for operation in operations:
                both.step(operation)
            for operation in closing(both.fast):
                both.step(operation)
            both.compare_trees(last)
        finally:
            while both.fast.scopes:
                both.fast.scopes.pop().__exit__(None, None, None)
    return both
