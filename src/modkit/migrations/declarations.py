"""The declaration of migrations on a class, and what loading calls of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from modkit._renames import paths_after
from modkit._upstream import layer_loaders
from modkit.errors import MigrationError
from modkit.migrations.steps import Step
from modkit.migrations.versions import Subtree, bring, is_declared, table_of
from modkit.nn._load_plan import migrates_other_versions
from modkit.nn._overrides import STANDARD


_ClassT = TypeVar("_ClassT", bound=type)
# In the metadata of a module whose entries have been migrated: a class and its base may both
# declare, and each has a loader.
_DONE: Final = "modkit.migrated"


def declare(table: Mapping[int, Sequence[Step]]) -> Callable[[_ClassT], _ClassT]:
    """Declare how older state dicts of a module class become those of newer versions.

    The number is ``_version`` of the class, which ``state_dict()`` saves for each module, and 1 by
    default. The decorator sets it to the newest version of the table. ``load_state_dict`` of torch
    and of modkit then migrates, before a ``_load_from_state_dict`` of the class is called. A
    derived class inherits the table; one that declares steps itself adds them to those of its
    bases, and shares their numbers.

    Args:
        table: The steps to each version from 2 on. Steps of a version run one after the other.
            Names are relative to the class.

    Returns:
        A decorator that changes the class and returns it.

    Raises:
        TypeError: From the decorator, if the class is not a ``torch.nn.Module`` or declares
            migrations already, a version is below 2, ``_version`` of the class is below the newest
            one, a base that declares nothing has the version already, or an entry is not a list of
            steps.

    Example:
        >>> import torch
        >>> from modkit import migrations as mig
        >>> @mig.declare({2: [mig.rename("fc.*", "head.*")]})
        ... class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(2, 1)
        >>> Net().load_state_dict({"fc.weight": torch.ones(1, 2), "fc.bias": torch.ones(1)})
        <All keys matched successfully>
    """

    def decorate(cls: _ClassT) -> _ClassT:
        _declare(cls, table)
        return cls

    return decorate


def _declare(cls: Any, table: Mapping[Any, Any]) -> None:
    if torch.nn.Module not in getattr(cls, "__mro__", ()):
        raise TypeError(f"declare: {cls!r} is not a class of torch.nn.Module")
    if "__migrations__" in cls.__dict__:
        raise TypeError(f"declare: {cls.__name__} declares migrations already; use one table")
    for version, steps in table.items():
        if not isinstance(version, int) or version < 2:
            raise TypeError(f"declare: {cls.__name__}: versions are 2 and more, got {version!r}")
        if isinstance(steps, Step) or not all(isinstance(step, Step) for step in steps):
            raise TypeError(f"declare: {cls.__name__}: version {version} needs a list of steps")

    inherited = table_of(cls)
    own_version = cls.__dict__.get("_version")
    base_version: int = max(base._version for base in cls.__mro__[1:] if hasattr(base, "_version"))
    if table and not inherited and min(table) <= base_version:
        raise TypeError(
            f"declare: {cls.__name__}: its base has version {base_version} already; begin with "
            f"{base_version + 1}"
        )
    newest: int = max((*table, *inherited, base_version))
    if own_version is not None and own_version < newest:
        raise TypeError(
            f"declare: {cls.__name__}: _version is {own_version}, and steps lead to version "
            f"{newest}"
        )

    cls.__migrations__ = {version: [*steps] for version, steps in table.items()}
    cls._version = newest if own_version is None else own_version
    _add_loader(cls)


def _add_loader(cls: Any) -> None:
    own_loader = cls.__dict__.get("_load_from_state_dict")

    def _load_from_state_dict(
        self: Any,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("version") != self._version and _DONE not in local_metadata:
            local_metadata = {**local_metadata, _DONE: True}
            try:
                _migrate_own(self, state_dict, prefix, local_metadata.get("version"))
            except MigrationError as error:
                # A quantized child would raise a KeyError for what has not been migrated.
                if any(_needs_version(child) for child in self.modules()):
                    raise
                error_msgs.append(str(error))
                return

        # As cheap as possible: it is called for each module of each load.
        loader = (
            super(cls, self)._load_from_state_dict
            if own_loader is None
            else own_loader.__get__(self)
        )
        loader(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    _load_from_state_dict.__module__ = cls.__module__
    _load_from_state_dict.__qualname__ = f"{cls.__qualname__}._load_from_state_dict"
    cls._load_from_state_dict = _load_from_state_dict
    if own_loader is None:
        migrates_other_versions(_load_from_state_dict)


def _needs_version(module: Any) -> bool:
    """Return True if a class loads newer versions in another way, as quantized layers do."""
    loader = id(type(module)._load_from_state_dict)
    is_known = is_declared(module) or loader in STANDARD or loader in map(id, layer_loaders)
    return module._version > 1 and not is_known


def _migrate_own(module: Any, state_dict: dict[str, Any], prefix: str, version: int | None) -> None:
    """Migrate the entries of one module in place, before it loads them."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    entries = {key.removeprefix(prefix): state_dict[key] for key in keys}
    # The versions of the modules below are not known here, only where each of them was saved.
    old_paths = set[str]() if version is None else {*paths_after({name: name for name in entries})}
    subtree = Subtree(entries, {path: {"was": path} for path in old_paths}, prefix[:-1])
    if not bring(module, subtree, version, module._version):
        return

    for path, child in module.named_modules():
        old_path = subtree.saved.get(path, {}).get("was", path)
        # It would get the version of the module that was at its path when the file was saved.
        is_taken = path in old_paths and is_declared(child)
        if old_path != path and (is_taken or _needs_version(child)):
            raise MigrationError(
                f"{prefix}{path}: {type(child).__name__} was saved as {prefix}{old_path}, where "
                "its version is not found in this load; load what migrate(model, state_dict) "
                "returns"
            )

    for key in keys:
        del state_dict[key]
    state_dict.update({prefix + name: value for name, value in subtree.entries.items()})
