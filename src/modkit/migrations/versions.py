"""The part of a state dict that belongs to one module: its version, and the steps to another one."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modkit.averaging.names import canonical_name
from modkit.errors import MigrationError
from modkit.migrations.patterns import compiled
from modkit.migrations.steps import Change, Entries, Lazy, Step, UndecidableError, apply, shape_of
from modkit.nn._load_tensor import PLAIN


# The ``_metadata`` of a state dict, for each module, by its path.
Saved = dict[str, dict[str, Any]]


class Part:
    """The entries of a state dict for a module and all below it.

    Attributes:
        entries: The entries by their names relative to the module.
        saved: The metadata of modules by their paths relative to this one, whose own is "".
    """

    def __init__(self, entries: Entries, saved: Saved) -> None:
        self.entries = entries
        self.saved = saved


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


def bring(module: Any, path: str, part: Part, version: Any, goal: int) -> list[Change]:
    """Bring the part of one module from a version, or None if it is unknown, to another one.

    Args:
        module: The module, whose class declares migrations.
        path: Its path in the model, for messages.
        part: Its part of the state dict, which is changed.
        version: The version that was saved.
        goal: The version to reach.

    Returns:
        What was done.

    Raises:
        MigrationError: If that is impossible; the part is unchanged.
    """
    cls, newest = type(module), module._version
    label = f"{path or '(root)'}: {cls.__name__}"
    if not 1 <= goal <= newest:
        raise MigrationError(f"{label} has versions 1 to {newest}, not {goal}")
    if version is not None and not isinstance(version, int):
        # ``_metadata`` comes from a file.
        raise MigrationError(f"{label} was saved in version {version!r}, which is not a number")
    if version is not None and version > newest:
        raise MigrationError(
            f"{label} was saved in version {version}, and this class has version {newest}: update the package "
            f"that defines it, or let the newer one write version {newest}"
        )

    changes: list[Change] = []
    # A part that was left out of a state dict without versions is not filled with defaults.
    if part.entries or version is not None:
        try:
            since = version_of(module, part.entries) if version is None else version
            changes, part.entries, part.saved = _stepped(module, part, since, goal)
        except MigrationError as error:
            raise MigrationError(f"{label}: {error}") from error
    part.saved[""] = {**(part.saved.get("") or {}), "version": goal}
    return changes


def _stepped(
    module: torch.nn.Module, part: Part, since: int, goal: int
) -> tuple[list[Change], Entries, Saved]:
    """Return what the steps between two versions do, with the entries and metadata after them."""
    entries, saved = part.entries, dict(part.saved)
    changes: list[Change] = []
    for versions, step in _steps_between(type(module), since, goal):
        made: list[Change] = []
        before, entries = entries, apply(step, module, entries, made)
        if step.kind == "rename" and made:
            new_names = {change.sources[0]: change.targets[0] for change in made}
            saved = _moved(saved, moved_modules(before, new_names))
        changes += (change._replace(versions=versions) for change in made)
    return changes, entries, saved


def _steps_between(cls: type, since: int, goal: int) -> list[tuple[tuple[int, int], Step]]:
    """Return the steps from one version to another, each with the versions before and after it."""
    table = table_of(cls)
    if since <= goal:
        upwards = [version for version in table if since < version <= goal]
        return [((version - 1, version), step) for version in upwards for step in table[version]]
    downwards = [version for version in reversed(table) if goal < version <= since]
    return [
        ((version, version - 1), step.inverse())
        for version in downwards
        for step in reversed(table[version])
    ]


def moved_modules(names: Iterable[str], new_names: Mapping[str, str]) -> dict[str, str]:
    """Return the new path of each module all of whose tensors were renamed alike.

    Args:
        names: All names before.
        new_names: The new names of those that were renamed.
    """
    homes: dict[str, set[str]] = {}
    for name in names:
        target = new_names.get(name)
        path, _, leaf = name.rpartition(".")
        rest = f".{leaf}"
        while path:
            home = path if target is None else ""
            if target is not None and target.endswith(rest):
                home = target[: -len(rest)]
            homes.setdefault(path, set()).add(home)
            path, _, last = path.rpartition(".")
            rest = f".{last}{rest}"

    moved: dict[str, str] = {}
    for old, found in homes.items():
        new = found.pop()
        # A module within its old self is another module: it has no version yet.
        nested = f"{new}.".startswith(f"{old}.") or f"{old}.".startswith(f"{new}.")
        if not found and new and not nested:
            moved[old] = new
    return moved


def _moved(saved: Saved, moved: Mapping[str, str]) -> Saved:
    """Return the metadata under the new paths of modules, so that each finds its version."""
    result: Saved = {}
    taken = {*moved.values()}
    for path, own in saved.items():
        home, rest = path, ""
        while home and home not in moved:
            home, _, last = home.rpartition(".")
            rest = f".{last}{rest}"
        if home:
            result[moved[home] + rest] = own
        elif not any(f"{path}.".startswith(f"{new}.") for new in taken):
            result[path] = own
    return result


class _Reading(NamedTuple):
    """The result for a part without a version if it were of one version."""

    version: int
    misfits: list[str]
    renamed: set[str]
    complete: bool
    effects: list[tuple[Step, tuple[str, ...]]]

    def rank(self) -> tuple[float, bool]:
        """Return a lower value for a better fit."""
        # A renamed tensor of another shape has the new name at least, and does not fit under the old one.
        half = len(self.renamed.intersection(self.misfits)) / 2
        return len(self.misfits) - half, not self.complete


def version_of(module: Any, entries: Entries) -> int:
    """Return the version of a part without one: that with which it fits the module best.

    Raises:
        MigrationError: If two versions fit, and their steps differ, if it fits with none because a step
            is impossible, or if a step cannot be tried out without values.
    """
    cls = type(module)
    expected = {
        without_wrappers(name): _shape(value) for name, value in module.state_dict().items()
    }
    metas = {name: without_values(value) for name, value in entries.items()}
    readings: list[_Reading] = []
    failures: list[tuple[int, MigrationError]] = []
    for since in (module._version, *(version - 1 for version in reversed(table_of(cls)))):
        try:
            changes, made, _ = _stepped(module, Part(metas, {}), since, module._version)
        except UndecidableError:
            raise
        except MigrationError as error:
            failures.append((since, error))
            continue
        misfits = [name for name, value in made.items() if not _fits(name, value, expected)]
        renamed: set[str] = set()
        for change in changes:
            if change.step.kind == "rename":
                renamed.update(expected.keys() & change.targets)
            else:
                renamed.difference_update(change.targets)
        complete = not misfits and expected.keys() == made.keys()
        # A tensor that is added overwrites nothing of the file.
        effects = [(change.step, change.sources) for change in changes if change.sources]
        readings.append(_Reading(since, misfits, renamed, complete, effects))

    best = min(readings, key=_Reading.rank)
    for since, failure in failures:
        # Old names are there, and the step that they need is impossible.
        steps = _steps_between(cls, since, module._version)
        if any(_takes(step, name) for _, step in steps for name in best.misfits):
            raise failure
    for other in readings:
        if other.rank() == best.rank() and other.effects != best.effects:
            source = next(each[1][0] for each in other.effects if each not in best.effects)
            raise MigrationError(
                f"the state dict has no version, and {source} may be of version {other.version} or "
                f"{best.version}; say which: migrate(model, state_dict, "
                f"versions={{{cls.__name__}: {other.version}}})"
            )
    return best.version


def without_values(value: Any) -> Any:
    """Return an entry that has the dtype and shape of a tensor; other entries are returned as they are."""
    # Shards and quantized tensors stay what they are, as a step may refuse them.
    if type(value) not in PLAIN or value.is_quantized:
        return value
    return Lazy(torch.empty(tuple(value.shape), dtype=value.dtype, device="meta"), value.detach)


def without_wrappers(name: str) -> str:
    """Return a name without the parts of wrappers, but with ``module``, which may be a child's name."""
    return canonical_name(f"_.{name}")[2:]


def _shape(value: Any) -> torch.Size | None:
    is_lazy = isinstance(value, Tensor) and torch.nn.parameter.is_lazy(value)
    return None if is_lazy else shape_of(value)


def _takes(step: Step, name: str) -> bool:
    return any(compiled(pattern).fullmatch(name) for pattern in step.old)


def _fits(name: str, value: Any, expected: Mapping[str, torch.Size | None]) -> bool:
    if name not in expected:
        return False
    wanted, shape = expected[name], shape_of(value)
    return wanted is None or shape is None or shape == wanted
