"""The plan of a load: every entry is checked, in all modules, before the first one is written.

There is a plan if no class and no hook takes part in loading.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch

from modkit._messages import add_note
from modkit._tree import descend
from modkit._upstream import (
    PLAIN,
    FunctionT,
    copy_all_,
    layer_loaders,
    original_methods,
    transforms_are_active,
)
from modkit.nn._load_tensor import (
    Entry,
    Ties,
    check,
    may_fail,
    misfit,
    try_out,
    warn_if_meta,
    write,
)
from modkit.nn._overrides import STANDARD, TorchModule


TORCH_LOAD: Final = original_methods["_load_from_state_dict"]
_TORCH_SET_EXTRA_STATE: Final = original_methods["set_extra_state"]
_TORCH_GETATTR: Final = original_methods["__getattr__"]
_MISSING: Final = object()


def read_once(state_dict: Mapping[str, Any]) -> Any:
    """Return the entries of a mapping as a dict, which can be read again.

    A mapping that is not a dict may read files, or give its entries away.
    """
    if isinstance(state_dict, dict):
        return state_dict
    entries: Any = OrderedDict(state_dict)
    entries._metadata = getattr(state_dict, "_metadata", None)
    return entries


class Load:
    """One load: what is loaded, and what is wrong with it.

    Attributes:
        entries: What modules load from: a copy of the state dict.
        given: The state dict as the user passed it, for the explanation of an error.
        metadata: The versions of the modules that saved it, by name; None if it has none.
        saved: Looks up one of them.
        assign: Whether the entries themselves take the place of the tensors.
        missing: Names without an entry. This list and the next two are handed to every module.
        unexpected: Keys that no module loads.
        errors: The texts of all other problems.

    Args:
        state_dict: Names to tensors and extra state.
        assign: Whether the entries themselves take the place of the tensors.
    """

    def __init__(self, state_dict: Mapping[str, Any], *, assign: bool) -> None:
        # A copy, since hooks and overrides may edit what they are given.
        entries: Any = OrderedDict(state_dict)
        self.entries = entries
        self.given = state_dict
        self.metadata: Any = getattr(state_dict, "_metadata", None)
        self.saved: Any = (self.metadata or {}).get
        if self.metadata is not None:
            entries._metadata = self.metadata

        self.assign = assign
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []

    def local_metadata(self, prefix: str) -> dict[str, Any]:
        """Return the metadata of one module, and whether to assign."""
        # A copy, so that the flag does not stay behind in the caller's state dict.
        local = {} if self.metadata is None else dict(self.metadata.get(prefix[:-1], {}))
        # Torch leaves the flag of an earlier load in the state dict, and so in files.
        local.pop("assign_to_params_buffers", None)
        if self.assign:
            local["assign_to_params_buffers"] = self.assign
        return local

    def refuse(self, module: torch.nn.Module, *, strict: bool) -> None:
        """Raise all that is wrong as one error."""
        if not (self.errors or self.missing or self.unexpected):
            return

        errors = [*self.errors]
        for kind, keys in (("Unexpected", self.unexpected), ("Missing", self.missing)):
            if strict and keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} key(s) in state_dict: {quoted}. ")

        if errors:
            raise self._refusal(module, "\n\t".join(errors))

    def set_aside(self, misfits: dict[str, str]) -> None:
        """Move the entries that do not fit from the errors to ``misfits``, with the reason."""
        found = [(error, misfit(error)) for error in self.errors]
        misfits.update(reason for _, reason in found if reason)
        self.errors[:] = [error for error, reason in found if not reason]

    def _refusal(self, module: torch.nn.Module, listed: str) -> RuntimeError:
        """Return torch's error with the cause as notes.

        Made here, since an error in a variable of the frame that raises it is a reference cycle:
        model and state dict would stay until the next garbage collection.
        """
        error = RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}"
        )
        for line in self.explain(module):
            add_note(error, line)
        return error

    def explain(
        self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> list[str]:
        """Say why the entries do not fit, in a few lines.

        Hooks and classes may load under other names, so only the names that the load reported
        count.
        """
        # Imported here: it costs nothing until a load has failed.
        from modkit._mismatches import explain, shapes_of

        mismatched = [found[0] for found in map(misfit, self.errors) if found]
        # Whatever the model or the file holds, torch's error is shown, with an explanation or not.
        try:
            shapes = shapes_of(tensors or tensors_of(module))
            return explain(shapes, self.given, (self.missing, self.unexpected, mismatched))
        except Exception:  # noqa: BLE001
            return []


class Plan:
    """All that a load will write, in torch's order.

    Attributes:
        entries: Each entry to write, and the text of each error found.
        unsure: The keys of entries that may fail.
        added: The number of errors that belong to no key.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.unsure: set[str] = set()
        self.added = 0

    def check(self, loading: Load, *, strict: bool) -> None:
        """Collect the errors, those among them that torch would meet while writing."""
        if not (self.unsure or self.added):
            return

        assign = loading.assign
        refused = strict and bool(loading.missing or loading.unexpected)
        refused = refused or any(isinstance(entry, str) for entry in self.entries)

        for entry in self.entries:
            if isinstance(entry, str):
                loading.errors.append(entry)
            elif entry[3] in self.unsure:
                warn_if_meta(entry, assign=assign)
                # Trying out a tensor subclass, a shard for instance, may take as long as loading
                # it. That is spent only if the load is refused anyway, or if a plain tensor gets an
                # odd value.
                if refused or assign or type(entry[4]) in PLAIN:
                    loading.errors += try_out(entry, assign=assign)

    def write(self, loading: Load) -> None:
        """Write all entries, which are without errors."""
        if not self.entries:
            return
        with torch.no_grad():
            if loading.assign:
                self._assign_all(loading)
            else:
                self._copy_all(loading)

    def _copy_all(self, loading: Load) -> None:
        unsure = self.unsure
        sure = [entry for entry in self.entries if entry[3] not in unsure]
        targets, values = [entry[4] for entry in sure], [entry[5] for entry in sure]
        rest = self.entries

        # Otherwise one by one: the list kernel has no rules for transforms, and a tensor in several
        # places ends up with its last value, which may be the tensor itself, with what was loaded
        # into it before.
        if targets and len(set(map(id, targets))) == len(targets) and not transforms_are_active():
            # If it fails, too: each error names its entry, and the other entries are loaded.
            with suppress(Exception):
                copy_all_(targets, values, mixed=True)
                rest = [entry for entry in self.entries if entry[3] in unsure] if unsure else []

        for entry in rest:
            loading.errors += write(entry, assign=False, ties=None)

    def _assign_all(self, loading: Load) -> None:
        uses = Counter(id(entry[4]) for entry in self.entries)
        ties: Ties = {}
        for entry in self.entries:
            is_tied = uses[id(entry[4])] > 1
            loading.errors += write(entry, assign=True, ties=ties if is_tied else None)


class _NotPlannedError(Exception):
    """A class or a hook takes part in loading, or one key may belong to two tensors."""


def may_plan(module: torch.nn.Module) -> bool:
    """Return False if it is certain, before any entry is looked at, that there will be no plan."""
    state = module.__dict__
    return (
        not state.get("_load_state_dict_post_hooks")
        and not state.get("_load_state_dict_pre_hooks")
        and TorchModule._load_from_state_dict is TORCH_LOAD
        and TorchModule.set_extra_state is _TORCH_SET_EXTRA_STATE
        and TorchModule.__getattr__ is _TORCH_GETATTR
        and not torch.__future__.get_swap_module_params_on_conversion()
    )


def make_plan(module: torch.nn.Module, loading: Load) -> Plan | None:
    """Check all entries and write none; None if a class or a hook takes part in loading."""
    plan = Plan()
    classes = _PlannedClasses()
    met = {id(module)}

    def enter(name: str, child: torch.nn.Module, parent_prefix: str) -> str:
        # ``setattr`` accepts a name with a dot, and its keys may be those of another child.
        if "." in name:
            raise _NotPlannedError
        if loading.assign:
            # A member assigned under a first name is there when the second name is loaded.
            if id(child) in met:
                raise _NotPlannedError
            met.add(id(child))
        prefix = f"{parent_prefix}{name}."
        _plan_one(child, prefix, loading, plan, classes)
        return prefix

    try:
        _plan_one(module, "", loading, plan, classes)
        if module._modules:
            descend(module, "", enter)
    except _NotPlannedError:
        return None
    return plan


# By identity, as ``STANDARD``. Each function is held, so that no other object gets its identity.
_OF_LAYERS: Final = {id(loader): loader for loader in layer_loaders}
_DECLARED: Final[dict[int, object]] = {}


def migrates_other_versions(loader: FunctionT) -> FunctionT:
    """Mark a ``_load_from_state_dict`` that leaves entries of its class's version to super's."""
    _DECLARED[id(loader)] = loader
    return loader


class _PlannedClasses(dict[type, dict[str, object] | None]):
    """Caches for one walk how each class is planned for.

    Empty: its entries are checked here. None: it takes part in loading, so nothing can be planned.
    Else the metadata with which nothing is left to migrate.
    """

    def __missing__(self, cls: type[torch.nn.Module]) -> dict[str, object] | None:
        """Check a class that this walk has not met before."""
        migrating: dict[str, object] | None = None
        # An entry of a table need not be a module, but every object has ``__getattribute__``.
        reads_as_written = cls.__getattribute__ is object.__getattribute__
        if reads_as_written and getattr(cls, "set_extra_state", None) is _TORCH_SET_EXTRA_STATE:
            migrating = {}
            bases = cls.__mro__
            if id(cls._load_from_state_dict) in STANDARD and bases[-2] is TorchModule:
                # Ours or torch's, and no class behind torch's has another one.
                bases = ()

            for base in bases:
                loader = id(base.__dict__.get("_load_from_state_dict", TORCH_LOAD))
                if loader in STANDARD:
                    continue
                if loader not in _OF_LAYERS and loader not in _DECLARED:
                    migrating = None
                    break

                # A layer of torch has a number of its own, a declaration that of the class.
                version = getattr(base if loader in _OF_LAYERS else cls, "_version", None)
                if migrating and migrating["version"] != version:
                    # Two loaders for two versions: no metadata is that of both.
                    version = _MISSING
                migrating = {"version": version}
        self[cls] = migrating
        return migrating


def _plan_one(
    module: torch.nn.Module, prefix: str, loading: Load, plan: Plan, classes: _PlannedClasses
) -> None:
    """Check the entries of one module, and add them to the plan."""
    migrating = classes[type(module)]
    if migrating is None:
        raise _NotPlannedError

    state = module.__dict__
    if (
        "_modules" not in state
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or "_load_from_state_dict" in state
    ):
        raise _NotPlannedError

    # One comparison, since it is made for each such module of each load.
    if migrating and loading.saved(prefix[:-1]) != migrating:
        written = loading.saved(prefix[:-1])
        if not written or written.get("version") != migrating["version"]:
            if id(type(module)._load_from_state_dict) not in _OF_LAYERS:
                raise _NotPlannedError
            try:
                _migrate(module, prefix, loading, plan)
            except Exception as error:
                # It is raised again where torch meets it.
                raise _NotPlannedError from error

    if module._parameters or module._buffers:
        check_own(
            module, loading.entries, prefix, plan.entries, loading.missing, plan, loading.assign
        )


# The attributes that a layer of torch may add or remove besides its members.
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def _migrate(module: torch.nn.Module, prefix: str, loading: Load, plan: Plan) -> None:
    """Let a layer of torch update its entries of an old checkpoint, and no others.

    It runs on a stand-in without members, so it writes no tensor; all entries are checked first.
    """
    entries = loading.entries
    # A search of all keys for each layer would take quadratic time.
    names = dict.fromkeys((*module._parameters, *module._buffers, *_STATISTICS))
    keys = [prefix + name for name in names if prefix + name in entries]
    own = {key: entries[key] for key in keys}

    stand_in: Any = object.__new__(type(module))
    state = {**module._parameters, **module._buffers, **module.__dict__}
    stand_in.__dict__.update(state, _parameters={}, _buffers={})
    problems: list[str] = []
    stand_in._load_from_state_dict(
        own, prefix, loading.local_metadata(prefix), False, [], [], problems
    )

    for key in keys:
        if key not in own:
            del entries[key]
    entries.update(own)
    plan.entries += problems
    plan.added += len(problems)


def check_own(
    module: torch.nn.Module,
    entries: Mapping[str, Any],
    prefix: str,
    checked: list[Entry | str],
    missing: list[str],
    plan: Plan | None = None,
    assign: bool = False,
) -> None:
    """Add the entries for one module's tensors, or their problems; and missing or unsure keys."""
    # Read as attributes: a class may have a property of such a name.
    places: tuple[tuple[Any, Any], ...] = ((module._parameters, ()),)
    buffers = module._buffers
    if buffers:
        places = (*places, (buffers, module._non_persistent_buffers_set))

    for members, transient in places:
        for name, target in members.items():
            if target is None or name in transient:
                continue

            if plan is not None and "." in name:
                # Torch loads it, and then may take the key for that of a child as well.
                raise _NotPlannedError

            key = prefix + name
            value = entries.get(key, _MISSING)
            if type(value) in PLAIN and type(target) in PLAIN and value.shape == target.shape:
                checked.append((module, members, name, key, target, value))
                if plan is not None and may_fail(target, value, assign):
                    plan.unsure.add(key)
            elif value is _MISSING:
                missing.append(key)
            else:
                value, problem = check(key, target, value)
                entry = (module, members, name, key, target, value)
                checked.append(entry if problem is None else problem)
                if plan is not None:
                    plan.unsure.add(key)


def own_names(module: torch.nn.Module) -> set[str]:
    """Return the names of the tensors that a module saves and loads itself."""
    buffers = module._buffers
    transient = module._non_persistent_buffers_set if buffers else ()
    persistent = (item for item in buffers.items() if item[0] not in transient)
    members = (*module._parameters.items(), *persistent)
    return {name for name, tensor in members if tensor is not None}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers under all of their names."""
    tensors: dict[str, torch.Tensor] = {}

    def enter(name: str, module: torch.nn.Module, prefix: str) -> str:
        saved = own_names(module)
        members: dict[str, Any] = {**module._parameters, **module._buffers}
        path = f"{prefix}{name}." if name else prefix
        tensors.update({path + key: tensor for key, tensor in members.items() if key in saved})
        return path

    enter("", model, "")
    descend(model, "", enter)
    return tensors
