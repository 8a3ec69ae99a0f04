"""Loading a state dict into a module and all below it, in time linear in the number of modules.

If no class and no hook takes part in loading, all entries are checked before the first one is
written. Otherwise modules load one after the other, in torch's order.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.nn import Buffer, Parameter

from modkit._messages import text_of
from modkit._upstream import (
    EXTRA_STATE_KEY,
    FunctionT,
    IncompatibleKeys,
    foreach_copy_,
    layer_loaders,
    make_parameter,
    module_globals,
    original_methods,
)
from modkit.nn._load_tensor import PLAIN, Entry, Ties, check, may_fail, try_out, warn_if_meta, write
from modkit.nn._overrides import (
    STANDARD,
    StandardClasses,
    TorchModule,
    is_dynamo_compiling,
    is_standard,
    methods,
    patchable,
    refuse_cycle,
    standard,
)


class _Load:
    """One load: what is loaded, how, and what is wrong with it.

    ``missing``, ``unexpected`` and ``errors`` are handed to every module. ``planned`` holds, in
    torch's order, each entry to write and each error found; ``unsure`` the keys of entries that may
    fail; ``added`` counts the errors that belong to no key.
    """

    added = 0

    def __init__(self, state_dict: Mapping[str, Any], *, assign: bool) -> None:
        # A copy, since hooks and overrides may edit what they are given.
        entries: Any = OrderedDict(state_dict)
        self.entries = entries
        self.metadata: Any = getattr(state_dict, "_metadata", None)
        if self.metadata is not None:
            entries._metadata = self.metadata
        self.assign = assign
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []
        self.planned: list[Entry | str] = []
        self.unsure: set[str] = set()
        self.ties: Ties = {}

    def local_metadata(self, prefix: str) -> dict[str, Any]:
        """Return the metadata of one module, and whether to assign."""
        # A copy, so that the flag does not stay behind in the caller's state dict.
        local = {} if self.metadata is None else dict(self.metadata.get(prefix[:-1], {}))
        if self.assign:
            local["assign_to_params_buffers"] = self.assign
        return local

    def refuse(self, module: torch.nn.Module, *, strict: bool) -> None:
        """Raise all that is wrong as one error."""
        errors = [*self.errors]
        for kind, keys in (("Unexpected", self.unexpected), ("Missing", self.missing)):
            if strict and keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} key(s) in state_dict: {quoted}. ")
        if errors:
            listed = "\n\t".join(errors)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}"
            )


_MISSING: Final = object()

# The running loads, by the identity of the list of errors that is handed to every module. The list
# has to be an exact list, and overrides pass it on.
_RUNNING: Final[dict[int, _Load]] = {}


def load(
    self: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> IncompatibleKeys:
    """Copy the tensors of a state dict into this module and all below; as ``modkit.load_state_dict``.

    modkit: Loading takes time linear in the number of modules. If no class and no hook takes part in
    it, nothing is written unless every entry fits. With ``assign=True``, tied parameters stay tied if
    their entries share memory. The state dict, its metadata included, is not modified. Keys below a child
    that is None are unexpected. A load hook may remove itself while it runs. A module that contains
    itself raises a RecursionError that names it.
    """
    if not isinstance(cast("object", state_dict), Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    loading = _Load(state_dict, assign=assign)
    classes = _PlannedClasses()
    may_plan = _may_plan() and _plan_one(self, "", loading, classes)
    if may_plan and (not self._modules or _plan_below(self, loading, classes)):
        if len(loading.planned) - loading.added < len(loading.entries):
            loading.unexpected += _all_unexpected(self, loading)
        if loading.unsure or loading.added:
            _check_planned(loading, strict=strict)
        loading.refuse(self, strict=strict)
        if loading.planned:
            with torch.no_grad():
                (_assign_all if assign else _copy_all)(
                    cast("list[Entry]", loading.planned), loading
                )
            loading.refuse(self, strict=False)
    else:
        if may_plan:
            # Layers may have migrated entries before another module turned out to take part.
            loading = _Load(state_dict, assign=assign)
        _RUNNING[id(loading.errors)] = loading
        try:
            _load_in_order(self, loading)
        finally:
            del _RUNNING[id(loading.errors)]
        loading.refuse(self, strict=strict)
    return IncompatibleKeys(loading.missing, loading.unexpected)


load.__name__ = "load_state_dict"
method = patchable(load)


def load_state_dict(
    model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> IncompatibleKeys:
    """Copy the tensors of a state dict into any torch module, in linear time.

    ``torch.nn.Module.load_state_dict`` is O(n²) in the number of siblings; this function is O(n). If
    no class and no hook takes part in loading, nothing is written unless everything can be. A model
    that overrides ``load_state_dict`` has its own called.

    Args:
        model: Any ``torch.nn.Module``.
        state_dict: Names as ``state_dict()`` returns them, to tensors and extra state.
        strict: Require that the names match exactly.
        assign: Assign the tensors themselves, with their dtype and device, instead of copying their
            values; create the optimizer afterwards.

    Returns:
        The named tuple ``(missing_keys, unexpected_keys)``.

    Raises:
        RuntimeError: Lists all problems, if names do not match (``strict``) or tensors do not fit.

    Example:
        >>> import modkit, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> modkit.load_state_dict(model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        <All keys matched successfully>
    """
    if not isinstance(cast("object", model), TorchModule):
        raise TypeError(
            f"modkit.load_state_dict(): model must be a torch.nn.Module, got {torch.typename(model)}"
        )
    if not is_standard(model, "load_state_dict"):
        keys: IncompatibleKeys = model.load_state_dict(state_dict, strict=strict, assign=assign)
        return keys
    return load(model, state_dict, strict=strict, assign=assign)


@standard
def _load_from_state_dict(
    self: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load the parameters, persistent buffers and extra state of one module, not below it.

    Classes override this to migrate checkpoints of an older version, which ``local_metadata`` holds.

    modkit: Keys below a child that is None are unexpected. A load hook may remove itself while it runs.
    """
    # As in ``patchable``, without its wrapper.
    current = TorchModule._load_from_state_dict
    if current is not _TORCH_LOAD or is_dynamo_compiling():
        problems = missing_keys, unexpected_keys, error_msgs
        current(self, state_dict, prefix, local_metadata, strict, *problems)
        return

    for hook in tuple(self._load_state_dict_pre_hooks.values()):
        hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    assign = local_metadata.get("assign_to_params_buffers", False)
    missing: list[str] = []
    if self._parameters or self._buffers:
        checked: list[Entry | str] = []
        _check_own(self, state_dict, prefix, checked, missing)
        running = _RUNNING.get(id(error_msgs))
        ties: Ties = {} if running is None else running.ties
        error_msgs += _write_in_order(checked, ties, assign=assign)
    unexpected: list[str] = []
    if state_dict:
        unexpected += _unexpected(self, state_dict, prefix, _own_names(self))
    extra_key = prefix + EXTRA_STATE_KEY
    if type(self).set_extra_state is not TorchModule.set_extra_state:
        if extra_key in state_dict:
            self.set_extra_state(state_dict[extra_key])
        else:
            missing.append(extra_key)
    elif extra_key in state_dict:
        unexpected.insert(0, extra_key)
    if strict:
        missing_keys += missing
        unexpected_keys += unexpected


def _write_in_order(checked: list[Entry | str], ties: Ties, *, assign: bool) -> list[str]:
    """Write the entries of one module; return all problems, in torch's order."""
    problems: list[str] = []
    with torch.no_grad():
        for each in checked:
            if isinstance(each, str):
                problems.append(each)
            else:
                warn_if_meta(each, assign=assign, stacklevel=4)
                problems += write(each, assign=assign, ties=ties)
    return problems


def _check_own(
    module: torch.nn.Module,
    entries: Mapping[str, Any],
    prefix: str,
    checked: list[Entry | str],
    missing: list[str],
    loading: _Load | None = None,
) -> None:
    """Add the entries for one module's tensors, or their problems; and missing or unsure keys."""
    state = module.__dict__
    places: tuple[tuple[Any, Any], ...] = ((state["_parameters"], ()),)
    if state["_buffers"]:
        places = (*places, (state["_buffers"], state["_non_persistent_buffers_set"]))
    for members, transient in places:
        for name, target in members.items():
            if target is None or name in transient:
                continue
            key = prefix + name
            value = entries.get(key, _MISSING)
            if type(value) in PLAIN and type(target) in PLAIN and value.shape == target.shape:
                checked.append((module, members, name, key, target, value))
                if loading is not None and may_fail(target, value, loading.assign):
                    loading.unsure.add(key)
            elif value is _MISSING:
                missing.append(key)
            else:
                value, problem = check(key, target, value)
                entry = (module, members, name, key, target, value)
                checked.append(entry if problem is None else problem)
                if loading is not None:
                    loading.unsure.add(key)


def _own_names(module: torch.nn.Module) -> set[str]:
    transient = module._non_persistent_buffers_set
    buffers = (item for item in module._buffers.items() if item[0] not in transient)
    members = (*module._parameters.items(), *buffers)
    return {name for name, tensor in members if tensor is not None}


def _unexpected(
    module: torch.nn.Module, entries: Mapping[str, Any], prefix: str, names: set[str]
) -> Iterator[str]:
    """Yield each key below ``prefix`` that is neither the module's nor that of a child."""
    start = len(prefix)
    extra_key = prefix + EXTRA_STATE_KEY
    for key in entries:
        if not key.startswith(prefix) or key == extra_key:
            continue
        name, dot, _ = key[start:].partition(".")
        # A child that is None has no keys either: nothing would load what is below it.
        if not dot:
            if name not in names:
                yield key
        elif module._modules.get(name) is None and not (
            # Torch takes the key for that of the None, and a child named with a dot loads it.
            name in module._modules
            and any(
                key.startswith(f"{prefix}{child}.") for child in module._modules if "." in child
            )
        ):
            yield key


@dataclass
class _Part:
    """A module, and the entries of the state dict for it and all below it."""

    module: torch.nn.Module
    entries: dict[str, Any]
    prefix: str
    parts: dict[str, dict[str, Any]] | None = None

    def part_for(self, name: str) -> dict[str, Any]:
        """Return the entries below the child ``name``; all keys are sorted at once, in linear time."""
        if "." in name:
            # See ``_plan_below``.
            path = self.prefix + name + "."
            return {key: value for key, value in self.entries.items() if key.startswith(path)}
        if self.parts is None:
            self.parts = {}
            start = len(self.prefix)
            for key, value in self.entries.items():
                if key.startswith(self.prefix):
                    head, dot, _ = key[start:].partition(".")
                    if dot:
                        self.parts.setdefault(head, {})[key] = value
        return self.parts.pop(name, {})


def _parts(module: torch.nn.Module, entries: dict[str, Any]) -> Iterator[tuple[_Part, bool]]:
    """Yield each module below ``module`` and itself twice: before its children, and after (False)."""
    active = {id(module)}
    root = _Part(module, entries, "")
    yield root, True
    stack = [(root, iter(module._modules.items()))]
    while stack:
        parent, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            if id(child) in active:
                refuse_cycle(child)
            active.add(id(child))
            part = _Part(child, parent.part_for(name), f"{parent.prefix}{name}.")
            yield part, True
            stack.append((part, iter(child._modules.items())))
            break
        else:
            stack.pop()
            active.discard(id(parent.module))
            yield parent, False


def _load_in_order(module: torch.nn.Module, loading: _Load) -> None:
    if not module.__dict__.get("_modules"):
        _load_one(module, loading.entries, "", loading)
        _run_post_hooks(module, loading)
        return
    for part, before_children in _parts(module, loading.entries):
        if before_children:
            _load_one(part.module, part.entries, part.prefix, loading)
        else:
            _run_post_hooks(part.module, loading)


def _load_one(module: Any, entries: dict[str, Any], prefix: str, loading: _Load) -> None:
    # Strict for all of them, as in torch: the caller decides about missing keys.
    problems = (loading.missing, loading.unexpected, loading.errors)
    module._load_from_state_dict(entries, prefix, loading.local_metadata(prefix), True, *problems)


def _run_post_hooks(module: torch.nn.Module, loading: _Load) -> None:
    if module._load_state_dict_post_hooks:
        keys = IncompatibleKeys(loading.missing, loading.unexpected)
        for hook in tuple(module._load_state_dict_post_hooks.values()):
            if hook(module, keys) is not None:
                raise AssertionError(text_of("load_state_dict", "Hooks registered"))


_TORCH_LOAD: Final = original_methods["_load_from_state_dict"]
_TORCH_SET_EXTRA_STATE: Final = original_methods["set_extra_state"]
_TORCH_GETATTR: Final = original_methods["__getattr__"]


def _may_plan() -> bool:
    return (
        TorchModule._load_from_state_dict is _TORCH_LOAD
        and TorchModule.set_extra_state is _TORCH_SET_EXTRA_STATE
        and TorchModule.__getattr__ is _TORCH_GETATTR
        and not torch.__future__.get_swap_module_params_on_conversion()
    )


def _plan_below(module: torch.nn.Module, loading: _Load, classes: "_PlannedClasses") -> bool:
    """Check all other entries and write none; return False if a class or a hook takes part."""
    active = {id(module)}
    assigned = {id(module)}
    stack = [("", module, iter(module._modules.items()))]
    while stack:
        prefix, parent, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            key = id(child)
            if key in active:
                refuse_cycle(child)
            # ``setattr`` accepts a name with a dot, and its keys may be those of another child.
            if "." in name:
                return False
            if loading.assign:
                # A member assigned under a first name is there when the second name is loaded.
                if key in assigned:
                    return False
                assigned.add(key)
            path = f"{prefix}{name}."
            if not _plan_one(child, path, loading, classes):
                return False
            below = child.__dict__["_modules"]
            if below:
                active.add(key)
                stack.append((path, child, iter(below.items())))
                break
        else:
            stack.pop()
            active.discard(id(parent))
    return True


_MIGRATING: Final[set[object]] = set(layer_loaders)


def only_migrates(loader: FunctionT) -> FunctionT:
    """Mark a ``_load_from_state_dict`` that edits its entries, writes no tensor, and calls super's."""
    _MIGRATING.add(loader)
    return loader


class _PlannedClasses(dict[type, tuple[object, ...] | None]):
    """Caches for one walk how each class is planned for.

    Empty: its entries are checked here. None: it takes part in loading, so nothing can be planned.
    Else the versions of the classes behind it whose own methods migrate entries first.
    """

    def __missing__(self, cls: type[torch.nn.Module]) -> tuple[object, ...] | None:
        """Check a class that this walk has not met before."""
        found: tuple[object, ...] | None = None
        if getattr(cls, "set_extra_state", None) is _TORCH_SET_EXTRA_STATE:
            found = ()
            bases = cls.__mro__
            if cls._load_from_state_dict is _load_from_state_dict and bases[-2] is TorchModule:
                # Ours, and no class behind torch's has another one.
                bases = ()
            for base in bases:
                loader = base.__dict__.get("_load_from_state_dict", _load_from_state_dict)
                if loader in STANDARD:
                    continue
                if loader not in _MIGRATING:
                    found = None
                    break
                found += (getattr(base, "_version", None),)
        self[cls] = found
        return found


def _plan_one(
    module: torch.nn.Module, prefix: str, loading: _Load, classes: _PlannedClasses
) -> bool:
    """Check the entries of one module; return False if it or a hook takes part in loading."""
    migrating = classes[type(module)]
    if migrating is None:
        return False
    state = module.__dict__
    if (
        "_modules" not in state
        or state["_load_state_dict_pre_hooks"]
        or state["_load_state_dict_post_hooks"]
        or "_load_from_state_dict" in state
    ):
        return False
    written = (loading.metadata or {}).get(prefix[:-1]) if migrating else None
    if migrating and any(not written or written.get("version") != v for v in migrating):
        try:
            _migrate(module, prefix, loading)
        except Exception:  # noqa: BLE001 - it is raised again where torch meets it
            return False
    if state["_parameters"] or state["_buffers"]:
        _check_own(module, loading.entries, prefix, loading.planned, loading.missing, loading)
    return True


def _migrate(module: torch.nn.Module, prefix: str, loading: _Load) -> None:
    """Let a layer's own method update the entries of an old checkpoint, on a stand-in without members."""
    local = loading.local_metadata(prefix)
    stand_in: Any = object.__new__(type(module))
    state = {**module._parameters, **module._buffers, **module.__dict__}
    stand_in.__dict__.update(state, _parameters={}, _buffers={}, _modules={})
    problems: list[str] = []
    stand_in._load_from_state_dict(loading.entries, prefix, local, True, [], [], problems)
    loading.planned += problems
    loading.added += len(problems)


def _all_unexpected(module: torch.nn.Module, loading: _Load) -> Iterator[str]:
    """Yield the unexpected keys in the order in which the modules would report them."""
    for part, before_children in _parts(module, loading.entries):
        if before_children:
            extra_key = part.prefix + EXTRA_STATE_KEY
            if extra_key in part.entries:
                yield extra_key
            yield from _unexpected(part.module, part.entries, part.prefix, _own_names(part.module))


def _check_planned(loading: _Load, *, strict: bool) -> None:
    """Collect the errors, those among them that torch would meet while writing."""
    assign = loading.assign
    refused = strict and bool(loading.missing or loading.unexpected)
    refused = refused or any(isinstance(each, str) for each in loading.planned)
    for each in loading.planned:
        if isinstance(each, str):
            loading.errors.append(each)
        elif each[3] in loading.unsure:
            warn_if_meta(each, assign=assign, stacklevel=5)
            # Trying out a tensor subclass, a shard for instance, may take as long as loading it. That
            # is spent only if the load is refused anyway, or if a plain tensor gets an odd value.
            if refused or assign or type(each[4]) in PLAIN:
                loading.errors += try_out(each, assign=assign)


def _copy_all(entries: list[Entry], loading: _Load) -> None:
    unsure = loading.unsure
    # A tensor in several places ends up with its last value.
    sure = {id(each[4]): each for each in entries if each[3] not in unsure}.values()
    if sure:
        foreach_copy_([each[4] for each in sure], [each[5] for each in sure])
    for entry in entries if unsure else ():
        if entry[3] in unsure:
            loading.errors += write(entry, assign=False, ties=None)


def _assign_all(entries: list[Entry], loading: _Load) -> None:
    uses = Counter(id(entry[4]) for entry in entries)
    classes = StandardClasses(_SETTING)
    announced = (
        module_globals._global_parameter_registration_hooks
        or module_globals._global_buffer_registration_hooks
    )
    unsure, plain = loading.unsure, torch.Tensor
    last, direct = None, False
    for entry in entries:
        module, members, name, key, target, value = entry
        if module is not last:
            last, direct = module, not announced and _registers_directly(module, classes)
        tied = uses[id(target)] > 1
        if type(value) is plain and direct and key not in unsure:
            # The essence of registering, if nothing else takes part.
            if type(target) is Parameter and not tied and members is module._parameters:
                members[name] = make_parameter(value, target.requires_grad)
                continue
            is_buffer = type(target) is plain and members is module._buffers
            if is_buffer and not isinstance(value, Buffer):
                members[name] = value
                continue
        loading.errors += write(entry, assign=True, ties=loading.ties if tied else None)


_SETTING: Final = methods("__setattr__", "__getattr__", "register_parameter", "register_buffer")


def _registers_directly(module: torch.nn.Module, classes: StandardClasses) -> bool:
    """Return True if registering a member of ``module`` is no more than entering it in a dict."""
    own = module.__dict__
    parameters = own["_parameters"]
    return (
        classes[type(module)]
        and "register_parameter" not in own
        and "register_buffer" not in own
        # A plain attribute, buffer or child with a parameter's name is deleted by an assignment.
        and own.keys().isdisjoint(parameters)
        and module._non_persistent_buffers_set.isdisjoint(parameters)
        and module._buffers.keys().isdisjoint(parameters)
        and module._modules.keys().isdisjoint(parameters)
    )
