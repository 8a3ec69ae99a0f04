"""The entries of one module in a state dict: their version, and the steps to another one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modkit._renames import beginnings, paths_after
from modkit._upstream import PLAIN
from modkit.averaging.tensors import without_wrappers
from modkit.errors import MigrationError
from modkit.migrations.patterns import matches
from modkit.migrations.steps import (
    Change,
    Entries,
    Lazy,
    Step,
    UndecidableError,
    apply,
    replaced,
    shape_of,
)


# The ``_metadata`` of a state dict, for each module, by its path.
Saved = dict[str, dict[str, Any]]


@dataclass
class Subtree:
    """The entries of a state dict for a module and all below it.

    Attributes:
        entries: The entries by their names relative to the module.
        saved: The metadata of modules by their paths relative to this one, whose own is "".
        path: The path of the module in the model.
    """

    entries: Entries
    saved: Saved
    path: str = ""
    # Sorted once, for all children: by the first segment of names, with the dot behind it.
    _groups: "dict[str, Subtree]" = field(default_factory=dict)

    def child(self, name: str) -> "Subtree":
        """Return the entries of a child; :meth:`join` puts them back when they have changed."""
        if not self._groups:
            for key, value in self.entries.items():
                head, dot, rest = key.partition(".")
                self._group(head + dot).entries[rest] = value
            for path, metadata in self.saved.items():
                head, _, rest = path.partition(".")
                if path:
                    self._group(f"{head}.").saved[rest] = metadata
        return self._group(f"{name}.")

    def _group(self, head: str) -> "Subtree":
        if head not in self._groups:
            prefix = f"{self.path}." if self.path else ""
            self._groups[head] = Subtree({}, {}, prefix + head.removesuffix("."))
        return self._groups[head]

    def join(self) -> None:
        """Put the parts of the children together."""
        if not self._groups:
            return

        self.entries = {
            head + rest: value
            for head, group in self._groups.items()
            for rest, value in group.entries.items()
        }
        self.saved = {path: metadata for path, metadata in self.saved.items() if not path}
        for head, group in self._groups.items():
            for path, metadata in group.saved.items():
                self.saved[(head + path).rstrip(".")] = metadata
        self._groups = {}


def table_of(cls: type) -> dict[int, list[Step]]:
    """Return the steps to each version of a class, those that its bases declare first."""
    table: dict[int, list[Step]] = {}
    for base in reversed(cls.__mro__):
        for version, steps in base.__dict__.get("__migrations__", {}).items():
            table.setdefault(version, []).extend(steps)
    return dict(sorted(table.items()))


def is_declared(module: torch.nn.Module) -> bool:
    """Return True if the class of a module declares migrations."""
    return hasattr(type(module), "__migrations__")


def bring(module: Any, subtree: Subtree, version: Any, goal: int) -> list[Change]:
    """Bring the entries of a module from a version, None if unknown, to a goal, or change none."""
    cls = type(module)
    newest = module._version
    label = f"{subtree.path or '(root)'}: {cls.__name__}"
    if not 1 <= goal <= newest:
        raise MigrationError(f"{label} has versions 1 to {newest}, not {goal}")
    # Of two bases, Python takes the version of the first one, and both have steps.
    highest = max(table_of(cls), default=1)
    if newest < highest:
        raise MigrationError(
            f"{label} has version {newest} of its first base, and inherits steps to version "
            f"{highest}: put @declare({{}}) on it"
        )
    # ``_metadata`` comes from a file.
    if version is not None and not isinstance(version, int):
        raise MigrationError(f"{label} was saved in version {version!r}, which is not a number")
    if version is not None and version > newest:
        raise MigrationError(
            f"{label} was saved in version {version}, and this class has version {newest}: update "
            f"the package that defines it, or let the newer one write version {newest}"
        )

    changes: list[Change] = []
    # A module that was left out of a state dict without versions is not filled with defaults.
    if subtree.entries or version is not None:
        try:
            since = version_of(module, subtree.entries) if version is None else version
            stepped = _stepped(module, subtree, since, goal)
        except MigrationError as error:
            raise MigrationError(f"{label}: {error}") from error
        subtree.entries = stepped.entries
        subtree.saved = stepped.saved
        changes = [change._replace(owner=f"{label} {change.owner}") for change in stepped.changes]
    subtree.saved[""] = {**(subtree.saved.get("") or {}), "version": goal}
    return changes


class _Stepped(NamedTuple):
    """The entries of a module after the steps between two versions."""

    entries: Entries
    saved: Saved
    changes: list[Change]


def _stepped(module: torch.nn.Module, subtree: Subtree, since: int, goal: int) -> _Stepped:
    entries = subtree.entries
    saved = dict(subtree.saved)
    changes: list[Change] = []
    for versions, step in _steps_between(type(module), since, goal):
        applied = apply(step, module, entries)
        if not applied:
            continue

        if step.kind == "rename":
            renamed = {change.sources[0]: change.targets[0] for change in applied}
            saved = _moved(saved, {name: name for name in entries} | renamed)
        entries = replaced(step, entries, applied)
        changes += (change._replace(owner=versions) for change in applied)
    return _Stepped(entries, saved, changes)


def _steps_between(cls: type, since: int, goal: int) -> list[tuple[str, Step]]:
    """Return the steps from one version to another, each with the versions before and after it."""
    upwards = [
        (f"{version - 1} -> {version}", step)
        for version, steps in table_of(cls).items()
        for step in steps
        if since < version <= goal
    ]
    downwards = [
        (f"{version} -> {version - 1}", step.inverse())
        for version, steps in reversed(table_of(cls).items())
        for step in reversed(steps)
        if goal < version <= since
    ]
    return upwards or downwards


def _moved(saved: Saved, new_names: Mapping[str, str]) -> Saved:
    """Return the metadata under the new paths of modules, so that each finds its version."""
    moved: dict[str, str] = {}
    for path, (new_path, *other_paths) in paths_after(new_names).items():
        if not path or not new_path or other_paths:
            continue
        # A module within its old self, or around it, is another module: it has no version yet.
        if path not in beginnings(new_path) and new_path not in beginnings(path):
            moved[path] = new_path

    taken = {*moved.values()}
    result: Saved = {}
    for path, metadata in saved.items():
        origins = [above for above in beginnings(path) if above in moved]
        if origins:
            result[moved[origins[-1]] + path.removeprefix(origins[-1])] = metadata
        elif taken.isdisjoint(beginnings(path)):
            result[path] = metadata
    return result


class _Reading(NamedTuple):
    """Entries without a version, read as those of one version, and migrated."""

    version: int
    misfits: list[str]
    misplaced: int
    renamed: set[str]
    is_complete: bool
    effects: list[tuple[Step, tuple[str, ...]]]

    def rank(self) -> tuple[float, int, bool]:
        """Return a lower value for a better fit."""
        # A renamed tensor of another shape has the new name at least, and does not fit under the
        # old one.
        half = len(self.renamed.intersection(self.misfits)) / 2
        return len(self.misfits) - half, self.misplaced, not self.is_complete


def version_of(module: Any, entries: Entries) -> int:
    """Return the version of entries without one: that with which they fit the module best."""
    cls = type(module)
    expected = {without_wrappers(name): value for name, value in module.state_dict().items()}
    metas = Subtree({name: without_values(value) for name, value in entries.items()}, {})
    # Children that migrate later: names below them may be old, but show where the child is.
    below = ((path, child) for path, child in module.named_modules() if path)
    children = {without_wrappers(path) for path, child in below if is_declared(child)}
    readings: list[_Reading] = []
    failures: dict[int, MigrationError] = {}
    for since in (module._version, *(version - 1 for version in reversed(table_of(cls)))):
        try:
            stepped = _stepped(module, metas, since, module._version)
        except UndecidableError:
            raise
        except MigrationError as error:
            # Without its traceback, which refers to this frame: a reference cycle.
            failures[since] = error.with_traceback(None)
            continue
        readings.append(_read_as(since, module, stepped, expected, children))

    best = min(readings, key=_Reading.rank)
    for since, failure in failures.items():
        # Old names are there, and the step that they need is impossible.
        for _, step in _steps_between(cls, since, module._version):
            if any(True for pattern in step.old for _ in matches(pattern, best.misfits)):
                try:
                    raise failure
                finally:
                    del failure
                    failures.clear()
    for other in readings:
        if other.rank() == best.rank() and other.effects != best.effects:
            source = next(
                names[0] for step, names in other.effects if (step, names) not in best.effects
            )
            raise MigrationError(
                f"the state dict has no version, and {source} may be of version {other.version} or "
                f"{best.version}; say which: migrate(model, state_dict, "
                f"versions={{{cls.__name__}: {other.version}}})"
            )
    return best.version


def _read_as(
    since: int, module: Any, stepped: _Stepped, expected: Entries, children: set[str]
) -> _Reading:
    """Return how entries fit a module if they are of a version; ``children`` migrate later."""
    result, _, changes = stepped
    misfits = [name for name in result if not _fits(name, result[name], expected)]
    paths = [beginnings(without_wrappers(name)) for name in misfits]
    misplaced = sum(children.isdisjoint(path) for path in paths)

    renamed: set[str] = set()
    for change in changes:
        if change.step.kind == "rename":
            renamed.update(expected.keys() & change.targets)
        else:
            renamed.difference_update(change.targets)

    is_complete = expected.keys() == result.keys() and all(
        _fits(name, value, expected) for name, value in result.items()
    )
    return _Reading(since, misfits, misplaced, renamed, is_complete, _effects(changes))


def _effects(changes: list[Change]) -> list[tuple[Step, tuple[str, ...]]]:
    """Return the steps that change tensors of a file, each with the names that it takes."""
    added: set[str] = set()
    effects: list[tuple[Step, tuple[str, ...]]] = []
    for change in changes:
        # A tensor that is added overwrites nothing, and a later step may rename or drop it.
        is_added = added.issuperset(change.sources)
        added.difference_update(change.sources)
        if is_added:
            added.update(change.targets)
        else:
            effects.append((change.step, change.sources))
    return effects


def _fits(name: str, value: Any, expected: Entries) -> bool:
    """Return True if the module has an entry of this name and shape, or of no shape yet."""
    if name not in expected:
        return False
    own_value = expected[name]
    is_lazy = isinstance(own_value, Tensor) and torch.nn.parameter.is_lazy(own_value)
    shapes = {None if is_lazy else shape_of(own_value), shape_of(value)}
    return len(shapes) == 1 or None in shapes


def without_values(value: Any) -> Any:
    """Return an entry with the dtype and shape of a tensor; others are returned as they are."""
    # Shards and quantized tensors stay what they are, as a step may refuse them.
    if type(value) not in PLAIN or value.is_quantized:
        return value
    return Lazy(torch.empty(tuple(value.shape), dtype=value.dtype, device="meta"), value.detach)
