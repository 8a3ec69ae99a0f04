"""Loading a state dict into a module and all below it.

Where no class and no hook takes part in loading, all entries are checked before the first one is
written. Otherwise modules load one after the other, in torch's order.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from modkit._errors import MSG_LOAD_POST_HOOK_RETURN
from modkit._types import FunctionT
from modkit._upstream import (
    EXTRA_STATE_KEY,
    IncompatibleKeys,
    foreach_copy_,
    layer_loaders,
    original_methods,
)
from modkit.nn._load_entry import PLAIN_TENSORS, Entry, Problems, check, write
from modkit.nn._tree import STANDARD, implements, method_of_module, refuse_cycle, standard


@standard
@method_of_module
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

    This function is itself the method ``Module._load_from_state_dict``, which classes override to
    migrate old checkpoints: ``local_metadata`` tells the version that wrote them. Problems are
    added to the three lists, which all modules of a load share.
    """
    for hook in tuple(self._load_state_dict_pre_hooks.values()):
        hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    if isinstance(error_msgs, Problems) and error_msgs.planned is not None:
        _plan_own(self, state_dict, prefix, missing_keys, error_msgs, error_msgs.planned)
        return
    # Within ``load_state_dict`` the keys are part of the result, strict or not.
    report = strict or isinstance(error_msgs, Problems)
    assign = local_metadata.get("assign_to_params_buffers", False)
    targets = _own_targets(self)
    for name, target in targets.items():
        key = prefix + name
        if key not in state_dict:
            if report:
                missing_keys.append(key)
            continue
        value, problem = check(key, target, state_dict[key])
        if problem is None:
            entry = (self, name, key, target, value)
            problem = write(entry, assign=assign, problems=error_msgs)
        if problem is not None:
            error_msgs.append(problem)
    extra_key = prefix + EXTRA_STATE_KEY
    if implements(self, "set_extra_state"):
        if extra_key in state_dict:
            self.set_extra_state(state_dict[extra_key])
        elif report:
            missing_keys.append(extra_key)
    elif report and extra_key in state_dict:
        unexpected_keys.append(extra_key)
    if report:
        unexpected_keys += _unexpected(self, state_dict, prefix, targets)


def _own_targets(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    targets: dict[str, torch.Tensor] = {
        name: tensor for name, tensor in module._parameters.items() if tensor is not None
    }
    if module._buffers:
        targets |= {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
    return targets


def _unexpected(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    targets: Mapping[str, torch.Tensor],
) -> Iterator[str]:
    """Yield each key below ``prefix`` that is neither the module's nor that of a child."""
    start = len(prefix)
    extra_key = prefix + EXTRA_STATE_KEY
    for key in state_dict:
        if not key.startswith(prefix) or key == extra_key:
            continue
        name, dot, _ = key[start:].partition(".")
        # A child that is None has no keys either: nobody would load what is below it.
        if (module._modules.get(name) is None) if dot else name not in targets:
            yield key


def load(
    module: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool, assign: bool
) -> IncompatibleKeys:
    """Load ``state_dict`` into ``module`` and all below it, parents first."""
    if not isinstance(cast("object", state_dict), Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    loading = _plan(module, state_dict, assign)
    if loading is None:
        loading = _Load(state_dict, strict=strict, assign=assign, problems=Problems())
        _load_in_order(module, loading)
        loading.refuse(module, strict=strict)
    else:
        loading.refuse(module, strict=strict)
        _write_all(loading)
        loading.refuse(module, strict=False)
    return IncompatibleKeys(loading.missing, loading.unexpected)


class _Load:
    """One call of ``load_state_dict``: what is loaded, how, and what is wrong with it."""

    def __init__(
        self, state_dict: Mapping[str, Any], *, strict: bool, assign: bool, problems: Problems
    ) -> None:
        self.metadata: Any = getattr(state_dict, "_metadata", None)
        # Hooks and overrides may edit what they are given, so they are given a copy.
        entries: Any = OrderedDict(state_dict)
        if self.metadata is not None:
            entries._metadata = self.metadata
        self.entries = entries
        self.strict = strict
        self.assign = assign
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.problems = problems
        self.planned = [] if problems.planned is None else problems.planned

    def load_one(self, module: torch.nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """Call the module's ``_load_from_state_dict``."""
        # A copy, so that the flag does not stay behind in the caller's state dict.
        local = {} if self.metadata is None else dict(self.metadata.get(prefix[:-1], {}))
        if self.assign:
            local["assign_to_params_buffers"] = self.assign
        # Torch's own function reports keys only if it is told that the load is strict.
        strict = self.strict or not _ends_here(type(module))
        module._load_from_state_dict(
            entries, prefix, local, strict, self.missing, self.unexpected, self.problems
        )

    def refuse(self, module: torch.nn.Module, *, strict: bool) -> None:
        """Raise all that is wrong as one error."""
        errors = self.problems
        if strict and self.unexpected:
            errors.insert(0, f"Unexpected key(s) in state_dict: {_quoted(self.unexpected)}. ")
        if strict and self.missing:
            errors.insert(0, f"Missing key(s) in state_dict: {_quoted(self.missing)}. ")
        if errors:
            listed = "\n\t".join(errors)
            message = f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}"
            raise RuntimeError(message)


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _ends_here(cls: type) -> bool:
    """Tell whether ``super()`` of an overriding class leads to this file's function."""
    return any(
        vars(base).get("_load_from_state_dict") is _load_from_state_dict for base in cls.__mro__
    )


# --- modules one after the other ------------------------------------------------------------------


@dataclass
class _Parent:
    """A module whose children are being loaded."""

    module: torch.nn.Module
    entries: dict[str, Any]
    prefix: str
    children: Iterator[tuple[str, torch.nn.Module | None]]
    parts: dict[str, dict[str, Any]] | None = None

    def part_for(self, name: str) -> dict[str, Any]:
        """Return the entries below the child ``name`` in a dict of its own.

        All keys are sorted into their children at once: testing each key against each child, as
        torch does, takes time that grows with the square of the number of siblings.
        """
        if "." in name:
            # See ``_plan``.
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


def _load_in_order(module: torch.nn.Module, loading: _Load) -> None:
    active = {id(module)}
    loading.load_one(module, loading.entries, "")
    stack = [_Parent(module, loading.entries, "", iter(module._modules.items()))]
    while stack:
        parent = stack[-1]
        for name, child in parent.children:
            if child is None:
                continue
            if id(child) in active:
                refuse_cycle(child)
            active.add(id(child))
            path = parent.prefix + name + "."
            part = parent.part_for(name)
            loading.load_one(child, part, path)
            stack.append(_Parent(child, part, path, iter(child._modules.items())))
            break
        else:
            stack.pop()
            active.discard(id(parent.module))
            _run_post_hooks(parent.module, loading)


def _run_post_hooks(module: torch.nn.Module, loading: _Load) -> None:
    if module._load_state_dict_post_hooks:
        keys = IncompatibleKeys(loading.missing, loading.unexpected)
        for hook in tuple(module._load_state_dict_post_hooks.values()):
            if hook(module, keys) is not None:
                raise AssertionError(MSG_LOAD_POST_HOOK_RETURN)


# --- all entries checked, then written ------------------------------------------------------------


def _plan(module: torch.nn.Module, state_dict: Mapping[str, Any], assign: bool) -> _Load | None:
    """Check all entries and write none; return None where somebody takes part in loading."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return None
    loading = _Load(state_dict, strict=True, assign=assign, problems=Problems(planned=[]))
    classes = _PlannedClasses()
    if not _plan_one(module, "", loading, classes):
        return None
    active = {id(module)}
    seen = {id(module)}
    stack = [("", module, iter(module._modules.items()))]
    while stack:
        prefix, parent, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            if id(child) in active:
                refuse_cycle(child)
            path = prefix + name + "."
            # ``setattr`` accepts a name with a dot, and its keys may be those of another child. What
            # is assigned to a module under its first name is there when its second name is loaded.
            if "." in name or (assign and id(child) in seen):
                return None
            if not _plan_one(child, path, loading, classes):
                return None
            seen.add(id(child))
            if child._modules:
                active.add(id(child))
                stack.append((path, child, iter(child._modules.items())))
                break
        else:
            stack.pop()
            active.discard(id(parent))
    if len(loading.problems.found) < len(loading.entries):
        loading.unexpected += _all_unexpected(module, loading)
    return loading


_MIGRATING: set[object] = set(layer_loaders)


def only_migrates(loader: FunctionT) -> FunctionT:
    """Mark a ``_load_from_state_dict`` that changes the entries it is given, and no tensor.

    A module whose class has such a method leaves the check of all entries before the first write
    in place. The method has to end in that of ``Module``.
    """
    _MIGRATING.add(loader)
    return loader


class _PlannedClasses(dict[type, bool | None]):
    """Tells how a class is planned for; made for one walk.

    True: its entries are checked here. False: its own method is called, which touches no more than
    the entries that it is given, to migrate old checkpoints. None: it takes part in loading, so
    nothing can be planned.
    """

    def __missing__(self, cls: type[torch.nn.Module]) -> bool | None:
        """Look at a class that has not been met in this walk."""
        loader: Any = cls._load_from_state_dict
        found: bool | None = None
        if cls.set_extra_state is original_methods["set_extra_state"]:
            if loader in STANDARD:
                found = True
            elif loader in _MIGRATING and _ends_here(cls):
                found = False
        self[cls] = found
        return found


def _plan_one(
    module: torch.nn.Module, prefix: str, loading: _Load, classes: _PlannedClasses
) -> bool:
    """Check the entries of one module; return False if it or a hook takes part in loading."""
    checked_here = classes[type(module)]
    if (
        checked_here is None
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or "_load_from_state_dict" in module.__dict__
    ):
        return False
    if not checked_here:
        loading.load_one(module, loading.entries, prefix)
        return True
    _plan_own(module, loading.entries, prefix, loading.missing, loading.problems, loading.planned)
    return True


def _plan_own(
    module: torch.nn.Module,
    entries: Mapping[str, Any],
    prefix: str,
    missing: list[str],
    problems: Problems,
    planned: list[Entry],
) -> None:
    # No dict of the targets is made here: that would take a tenth of the time of a whole load.
    transient = module._non_persistent_buffers_set
    for members in (module._parameters, module._buffers):
        for name, target in members.items():
            if target is None or (name in transient and members is module._buffers):
                continue
            key = prefix + name
            if key not in entries:
                missing.append(key)
                continue
            problems.found.add(key)
            value, problem = check(key, target, entries[key])
            if problem is None:
                planned.append((module, name, key, target, value))
            else:
                problems.append(problem)


def _all_unexpected(module: torch.nn.Module, loading: _Load) -> Iterator[str]:
    """Yield the unexpected keys in the order in which the modules would report them."""
    stack = [_Parent(module, loading.entries, "", iter(module._modules.items()))]
    yield from _unexpected_of(stack[0])
    while stack:
        for name, child in stack[-1].children:
            if child is None:
                continue
            path = stack[-1].prefix + name + "."
            part = stack[-1].part_for(name)
            stack.append(_Parent(child, part, path, iter(child._modules.items())))
            yield from _unexpected_of(stack[-1])
            break
        else:
            stack.pop()


def _unexpected_of(parent: _Parent) -> Iterator[str]:
    extra_key = parent.prefix + EXTRA_STATE_KEY
    if extra_key in parent.entries:
        yield extra_key
    targets = _own_targets(parent.module)
    yield from _unexpected(parent.module, parent.entries, parent.prefix, targets)


def _write_all(loading: _Load) -> None:
    """Write the checked entries: copies in one call, all else one by one."""
    planned = loading.planned
    loading.problems.planned = None
    one_by_one = planned
    if not loading.assign:
        # By target, since one that stands in several places ends up with its last value.
        together: dict[int, Entry] = {}
        one_by_one = []
        for entry in planned:
            target, value = entry[3], entry[4]
            if (
                type(target) in PLAIN_TENSORS
                and type(value) in PLAIN_TENSORS
                and not target.is_meta
            ):
                together[id(target)] = entry
            else:
                one_by_one.append(entry)
        if together and not _copy_together(list(together.values())):
            one_by_one = planned
    for entry in one_by_one:
        problem = write(entry, assign=loading.assign, problems=loading.problems)
        if problem is not None:
            loading.problems.append(problem)


def _copy_together(entries: list[Entry]) -> bool:
    """Copy with one call; return False if one fails, since the call does not tell which."""
    try:
        with torch.no_grad():
            foreach_copy_([entry[3] for entry in entries], [entry[4] for entry in entries])
    except Exception:  # noqa: BLE001 - copying one by one gives the error that is reported
        return False
    return True
