"""Migrating the state dict of a model: the walk over its modules, upwards and downwards."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from modkit._tree import descend
from modkit._upstream import EXTRA_STATE_KEY
from modkit.averaging.tensors import canonical_names, canonical_paths, without_wrappers
from modkit.errors import MigrationError
from modkit.migrations.averages import (
    is_average_state,
    metadata_in,
    migrate_averages,
    tensors_in,
)
from modkit.migrations.steps import Change, Entries
from modkit.migrations.versions import (
    Saved,
    Subtree,
    bring,
    is_declared,
    without_values,
)


# Versions by class, or the metadata of a state dict: versions by the path of a module.
Versions: TypeAlias = Mapping[Any, Any]


def migrate(
    model: torch.nn.Module,
    state_dict: Mapping[str, Any],
    *,
    to: Mapping[type, int] | None = None,
    versions: Versions | None = None,
) -> "OrderedDict[str, Any]":
    """Return a state dict as the classes of a model write it now, or as they once did.

    ``load_state_dict`` of the model migrates by itself. This function is for other tensors by name,
    for files of older versions, and where the versions are known but not saved. The prefixes of
    DistributedDataParallel, FSDP, ``torch.compile`` and activation checkpointing are removed.

    Args:
        model: The model, whose values and versions are not used, except by functions of the user.
        state_dict: Its old or new state dict, averages or other tensors by the names of one, or the
            state of an ``EMA`` or an ``EMACallback``. It is not modified; tensors that do not
            change are shared.
        to: Versions to return to, by class. Other classes get their present version.
        versions: Versions of a state dict that has lost its own: its ``_metadata``, or versions by
            class. Without versions, names and shapes decide.

    Returns:
        The entries in the order of the model, with ``_metadata``; the others come last.

    Raises:
        TypeError: If an argument has another type.
        MigrationError: If the state dict is newer than a class, may be of two versions, has no name
            of any version, or a step is impossible. Nothing is changed.

    Example:
        >>> import torch
        >>> from modkit import migrations as mig
        >>> @mig.declare({2: [mig.rename("fc.*", "head.*")]})
        ... class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(2, 1)
        >>> new = mig.migrate(Net(), {"fc.weight": torch.ones(1, 2), "fc.bias": torch.ones(1)})
        >>> list(new), list(mig.migrate(Net(), new, to={Net: 1}))
        (['head.weight', 'head.bias'], ['fc.weight', 'fc.bias'])
    """
    return migrate_with_record(model, state_dict, [], to=to, versions=versions)


def plan(
    model: torch.nn.Module,
    state_dict: Mapping[str, Any],
    *,
    to: Mapping[type, int] | None = None,
    versions: Versions | None = None,
) -> list[str]:
    """Return what ``migrate`` would do, one line for each change; no tensor is read.

    Args:
        model: As in ``migrate``.
        state_dict: As in ``migrate``.
        to: As in ``migrate``.
        versions: As in ``migrate``.

    Returns:
        Lines with the path of the module, its class, the versions before and after, the step, and
        the names and shapes before and after.

    Raises:
        TypeError: As ``migrate``.
        MigrationError: As ``migrate``.

    Example:
        >>> import torch
        >>> from modkit import migrations as mig
        >>> @mig.declare({2: [mig.merge(["up", "gate"], "up_gate")]})
        ... class Mlp(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up_gate = torch.nn.Parameter(torch.ones(8, 2))
        >>> print(*mig.plan(Mlp(), {"up": torch.ones(4, 2), "gate": torch.ones(4, 2)}))
        (root): Mlp 1 -> 2: merge up [4, 2], gate [4, 2] -> up_gate [8, 2]
    """
    record: list[Change] = []
    saved = getattr(state_dict, "_metadata", None)
    if is_average_state(_checked(model, state_dict)):
        # All averages change in the same way.
        saved = metadata_in(state_dict, tensors_in(state_dict))
        state_dict = tensors_in(state_dict)
    metas = {name: without_values(value) for name, value in state_dict.items()}
    described = with_metadata(metas, saved)
    migrate_with_record(model, described, record, to=to, versions=versions)
    return [str(change) for change in record]


def migrate_with_record(
    model: torch.nn.Module,
    state_dict: Mapping[str, Any],
    record: list[Change],
    *,
    to: Mapping[type, int] | None = None,
    versions: Versions | None = None,
) -> "OrderedDict[str, Any]":
    """Migrate, and add to ``record`` what was done."""
    _checked(model, state_dict)
    model = unwrapped(model)
    if is_average_state(state_dict):

        def migrate_names(tensors: Entries, saved: Saved | None) -> Any:
            tensors = with_metadata(tensors, saved)
            return migrate_with_record(model, tensors, record, to=to, versions=versions)

        buffer_names = {without_wrappers(name) for name, _ in model.named_buffers()}
        return with_metadata(migrate_averages(state_dict, migrate_names, buffer_names), None)

    goals = to or {}
    _check_goals(model, goals)
    entries = dict(state_dict)
    # A child of the model's own called ``module`` is not DistributedDataParallel's.
    if "module" not in model._modules:
        names = canonical_names(entries)
        entries = {canonical: state_dict[name] for name, canonical in names.items()}

    saved_versions = _saved_versions(versions, getattr(state_dict, "_metadata", None))
    subtree = Subtree(entries, saved_versions.by_path)
    by_class = saved_versions.by_class
    known_changes = len(record)
    modules = _walk(model, subtree, record=record, by_class=by_class, to=goals)
    if entries and len(record) == known_changes:
        _check_known(model, modules, subtree.entries)
    if goals:
        return with_metadata(subtree.entries, subtree.saved)
    present = {path: metadata for path, metadata in subtree.saved.items() if path in modules}
    return with_metadata(_in_model_order(modules, subtree.entries), present)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel and ``torch.compile``."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        name = "module" if isinstance(model, parallel) else "_orig_mod"
        inner = model._modules.get(name)
        if inner is None:
            return model
        model = inner


def _checked(model: object, state_dict: object) -> Mapping[str, Any]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"migrate: model must be a torch.nn.Module, got {torch.typename(model)}")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"migrate: state_dict must be a mapping, got {torch.typename(state_dict)}")
    for name in state_dict:
        if not isinstance(name, str):
            raise TypeError(f"migrate: names in a state dict are str, got {name!r}")
    return state_dict


def _check_goals(model: torch.nn.Module, to: Mapping[Any, Any]) -> None:
    for cls, version in to.items():
        if not isinstance(cls, type) or not isinstance(version, int):
            raise TypeError(f"migrate: to= maps classes to versions, got {cls!r}: {version!r}")
        if not any(isinstance(module, cls) and is_declared(module) for module in model.modules()):
            raise MigrationError(
                f"to={{{cls.__name__}: {version}}}: the model has no module of this class that "
                "declares migrations"
            )


class _SavedVersions(NamedTuple):
    """The versions of a state dict.

    Attributes:
        by_class: The versions that the caller gave by class.
        by_path: The metadata by the path of a module, without the segments of wrappers.
    """

    by_class: dict[type, int]
    by_path: Saved


def _saved_versions(versions: Versions | None, metadata: Versions | None) -> _SavedVersions:
    by_class: dict[type, int] = {}
    with_wrappers = dict(metadata or {})
    for key, value in (versions or {}).items():
        if isinstance(key, type) and isinstance(value, int):
            by_class[key] = value
        elif isinstance(key, str) and isinstance(value, Mapping):
            with_wrappers[key] = value
        else:
            raise TypeError(
                "migrate: versions= maps classes to versions, or is the _metadata of a state dict, "
                f"got {key!r}: {value!r}"
            )

    paths = canonical_paths(with_wrappers)
    by_path = {paths[path]: value for path, value in with_wrappers.items()}
    return _SavedVersions(by_class, by_path)


def _for_class(cls: type, values: Mapping[type, int]) -> int | None:
    return next((values[base] for base in cls.__mro__ if base in values), None)


def _walk(
    model: torch.nn.Module,
    root: Subtree,
    *,
    record: list[Change],
    by_class: Mapping[type, int],
    to: Mapping[type, int],
) -> dict[str, torch.nn.Module]:
    """Migrate all modules, upwards before their children and downwards after them, by path."""
    modules: dict[str, torch.nn.Module] = {}

    def upwards(module: Any, subtree: Subtree) -> None:
        modules[subtree.path] = module
        if module._version == 1:
            # Nothing could migrate it. Others keep what was saved: none means old, to BatchNorm.
            subtree.saved.setdefault("", {"version": 1})
        if is_declared(module):
            version = _for_class(type(module), by_class)
            metadata: Any = subtree.saved.get("")
            if version is None and isinstance(metadata, Mapping):
                version = metadata.get("version")
            record.extend(bring(module, subtree, version, module._version))

    def enter(name: str, child: torch.nn.Module, parent: Subtree) -> Subtree | None:
        if "." in name:
            # ``setattr`` accepts such a name, and its keys may be those of another child.
            return None
        is_inside_wrapper = not without_wrappers(name)
        subtree = parent if is_inside_wrapper else parent.child(name)
        upwards(child, subtree)
        return subtree

    def leave(module: Any, subtree: Subtree) -> None:
        subtree.join()
        goal = _for_class(type(module), to)
        if goal is not None and goal != module._version and is_declared(module):
            record.extend(bring(module, subtree, module._version, goal))

    upwards(model, root)
    descend(model, root, enter, leave)
    leave(model, root)
    return modules


def _in_model_order(modules: Mapping[str, torch.nn.Module], entries: Entries) -> Entries:
    """Sort entries as the model's own state dict is."""
    result = {name: entries[name] for name in _names_of(modules) if name in entries}
    return {**result, **entries}


def _names_of(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    for path, module in modules.items():
        prefix = f"{path}." if path else ""
        for name in (*module._parameters, *module._buffers, EXTRA_STATE_KEY):
            yield prefix + name


def _check_known(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], entries: Entries
) -> None:
    """Refuse entries of no version: a checkpoint that holds the state dict, for one."""
    # Hooks and quantized layers may save other names than they register.
    if entries.keys().isdisjoint(_names_of(modules)) and entries.keys().isdisjoint(
        without_wrappers(name) for name in model.state_dict()
    ):
        raise MigrationError(
            f"no name of the state dict is one of {type(model).__name__} in any version: it begins "
            f"with {', '.join(map(repr, [*entries][:3]))}. Pass the entry of the checkpoint that "
            "holds tensors by name"
        )


def with_metadata(entries: Entries, saved: Any) -> "OrderedDict[str, Any]":
    """Return entries as a state dict."""
    result: Any = OrderedDict(entries)
    if saved is not None:
        result._metadata = OrderedDict(saved)
    return cast("OrderedDict[str, Any]", result)
