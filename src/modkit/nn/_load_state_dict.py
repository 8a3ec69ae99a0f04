"""Loading a state dict into a module and all below it, in time linear in the number of modules.

If no class and no hook takes part in loading, all entries are checked before the first one is
written (``_load_plan.py``). Otherwise modules load one after the other, in torch's order.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch

from modkit._namespace import publish
from modkit._tree import descend
from modkit._upstream import EXTRA_STATE_KEY, IncompatibleKeys
from modkit.nn._load_plan import (
    TORCH_LOAD,
    Load,
    check_own,
    make_plan,
    may_plan,
    own_names,
    read_once,
    tensors_of,
)
from modkit.nn._load_tensor import Entry, Ties, warn_if_meta, write
from modkit.nn._overrides import TorchModule, is_standard, of_torch, patchable, standard


# The ties of the running loads that assign, by the identity of the list of errors that is handed to
# every module. The list has to be an exact list, and overrides pass it on.
_TIES: Final[dict[int, Ties]] = {}


def load(
    self: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> IncompatibleKeys:
    """Copy the tensors of a state dict into this module and all below it.

    As ``modkit.load_state_dict``, which takes any torch module.

    Args:
        self: The module.
        state_dict: Names as ``state_dict()`` returns them, to tensors and extra state.
        strict: Require that the names match exactly.
        assign: Assign the tensors themselves, with their dtype and device, instead of copying their
            values; create the optimizer afterwards.

    Returns:
        The named tuple ``(missing_keys, unexpected_keys)``.

    Raises:
        TypeError: If ``state_dict`` is not a mapping.
        RuntimeError: Lists all problems, if names do not match (``strict``) or tensors do not fit.
        RecursionError: If a module contains itself.

    modkit: Loading takes time linear in the number of modules. If no class and no hook takes part
    in it, nothing is written unless every entry fits. With ``assign=True``, tied parameters stay
    tied if their entries share memory. The state dict, its metadata included, is not modified. Keys
    below a child that is None are unexpected. A load hook may remove itself while it runs. A module
    that contains itself raises a RecursionError that names it. A refused load says why below the
    error, if it can tell: a prefix too much, for instance. With ``strict=False``, a load that takes
    none of the parameters warns, and says why.
    """
    loading = run_load(self, state_dict, strict=strict, assign=assign)
    if loading.unexpected and loading.missing:
        _warn_if_no_parameter_was_loaded(self, loading)
    return IncompatibleKeys(loading.missing, loading.unexpected)


def run_load(
    self: torch.nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    assign: bool = False,
    misfits: dict[str, str] | None = None,
) -> Load:
    """Load a state dict; return the load, with the keys that did not match."""
    # Entries that do not fit are errors without ``misfits``, which gets their keys and the reason.
    if not isinstance(cast("object", state_dict), Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    state_dict = read_once(state_dict)

    if may_plan(self):
        loading = Load(state_dict, assign=assign)
        plan = make_plan(self, loading)
        if plan is not None:
            # Most loads have an entry for each key; only then need no unexpected ones be looked
            # for.
            if len(plan.entries) - plan.added < len(loading.entries):
                loading.unexpected += _all_unexpected(self, loading)
            plan.check(loading, strict=strict)
            if misfits is not None:
                loading.set_aside(misfits)
                plan.entries = [entry for entry in plan.entries if not isinstance(entry, str)]
            loading.refuse(self, strict=strict)
            plan.write(loading)
            loading.refuse(self, strict=False)
            return loading

    # A new one: layers may have changed entries before another module turned out to take part.
    loading = Load(state_dict, assign=assign)
    _load_in_order(self, loading)
    if misfits is not None:
        loading.set_aside(misfits)
    loading.refuse(self, strict=strict)
    return loading


def _warn_if_no_parameter_was_loaded(module: torch.nn.Module, loading: Load) -> None:
    """Warn if keys were given, some of them in vain, and no parameter was loaded."""
    missing = {*loading.missing}
    tensors = tensors_of(module)
    names = [name for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Parameter)]
    if names and missing.issuperset(names):
        warned = f"load_state_dict(strict=False) loaded none of the {len(names)} parameters of "
        warned += type(module).__name__
        warnings.warn("\n".join([warned, *loading.explain(module, tensors)]), stacklevel=4)


# This file also has the function of this name for any module, so the method has another one here.
load.__name__ = "load_state_dict"
method = patchable(load)


def load_state_dict(
    model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> IncompatibleKeys:
    """Copy the tensors of a state dict into any torch module, in linear time.

    ``torch.nn.Module.load_state_dict`` is O(n²) in the number of siblings; this function is O(n).
    If no class and no hook takes part in loading, nothing is written unless everything can be. A
    model that overrides ``load_state_dict`` has its own called.

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
            The note below it says why, if that can be told from names and shapes.
        TypeError: If ``model`` is not a module, or ``state_dict`` is not a mapping.
        RecursionError: If a module contains itself.

    Warns:
        UserWarning: If ``strict`` is False and none of the parameters was loaded.

    Example:
        >>> import modkit, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> modkit.load_state_dict(model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        <All keys matched successfully>
    """
    if not isinstance(cast("object", model), TorchModule):
        raise TypeError(
            "modkit.load_state_dict(): model must be a torch.nn.Module, "
            f"got {torch.typename(model)}"
        )
    if not is_standard(model, "load_state_dict"):
        # An override may be from before ``assign``, or may have no ``strict``.
        options: dict[str, bool] = {"assign": assign} if assign else {}
        if not strict:
            options["strict"] = strict
        keys: IncompatibleKeys = model.load_state_dict(state_dict, **options)
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

    Classes override this to migrate checkpoints of an older version, which ``local_metadata``
    holds.

    Args:
        self: The module.
        state_dict: The entries of this module and all below it, which an override may edit.
        prefix: The prefix of this module's keys.
        local_metadata: The version that saved this module, and ``assign_to_params_buffers``.
        strict: True in every call of modkit, as in torch: the caller decides about names.
        missing_keys: Gets the names without an entry.
        unexpected_keys: Gets the keys that no module loads.
        error_msgs: Gets the texts of all other problems. All modules of a load share the lists.

    modkit: Keys below a child that is None are unexpected. A load hook may remove itself while it
    runs.
    """
    lists = missing_keys, unexpected_keys, error_msgs
    # As in ``patchable``, without its wrapper.
    if TorchModule._load_from_state_dict is not TORCH_LOAD or torch.compiler.is_dynamo_compiling():
        call = of_torch(self, "_load_from_state_dict")
        # A patch may return something.
        return cast("None", call(state_dict, prefix, local_metadata, strict, *lists))

    if self._load_state_dict_pre_hooks:
        # A copy of the table, so that a hook may remove itself.
        for hook in tuple(self._load_state_dict_pre_hooks.values()):
            hook(state_dict, prefix, local_metadata, strict, *lists)

    names: set[str] = set()
    missing: list[str] = []
    if self._parameters or self._buffers:
        # Before the first write: an assignment that a class refuses deletes the tensor that was
        # there.
        names = own_names(self)
        checked: list[Entry | str] = []
        check_own(self, state_dict, prefix, checked, missing)
        assign = local_metadata.get("assign_to_params_buffers", False)
        error_msgs += _write_in_order(checked, _TIES.get(id(error_msgs), {}), assign=assign)

    extra_key = prefix + EXTRA_STATE_KEY
    if type(self).set_extra_state is not TorchModule.set_extra_state:
        if extra_key in state_dict:
            self.set_extra_state(state_dict[extra_key])
        else:
            missing.append(extra_key)
    elif strict and extra_key in state_dict:
        unexpected_keys.append(extra_key)

    if strict:
        missing_keys += missing
        if state_dict:
            unexpected_keys += _unexpected(self, state_dict, prefix, names)
    return None


def _write_in_order(checked: list[Entry | str], ties: Ties, *, assign: bool) -> list[str]:
    """Write the entries of one module; return all problems, in torch's order."""
    problems: list[str] = []
    with torch.no_grad():
        for entry in checked:
            if isinstance(entry, str):
                problems.append(entry)
            else:
                warn_if_meta(entry, assign=assign)
                problems += write(entry, assign=assign, ties=ties)
    return problems


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
            # Torch takes the key for that of the None, and a member named with a dot loads it.
            name in module._modules
            and (
                key[start:] in names
                or any(
                    key.startswith(f"{prefix}{child}.") for child in module._modules if "." in child
                )
            )
        ):
            yield key


class _Part:
    """The entries of the state dict for a module and all below it."""

    def __init__(self, entries: dict[str, Any], prefix: str) -> None:
        self.entries = entries
        self.prefix = prefix
        self._by_child: dict[str, list[str]] = {}
        self._sorted: tuple[int, str | None] | None = None

    def child(self, name: str) -> "_Part":
        """Return the entries of a child; all keys are sorted at once, in linear time.

        They are sorted again after an edit: a hook may keep the dict of its module, and edit it
        while a child is loaded.
        """
        path = f"{self.prefix}{name}."
        if "." in name:
            # ``setattr`` accepts such a name, and its keys may be those of another child, too.
            below = {key: value for key, value in self.entries.items() if key.startswith(path)}
            return _Part(below, path)

        # New keys come last. A comparison of all keys would take quadratic time.
        present = len(self.entries), next(reversed(self.entries), None)
        if present != self._sorted:
            self._sorted = present
            self._by_child = {}
            start = len(self.prefix)
            for key in self.entries:
                if key.startswith(self.prefix):
                    head, dot, _ = key[start:].partition(".")
                    if dot:
                        self._by_child.setdefault(head, []).append(key)

        keys = self._by_child.get(name, ())
        return _Part({key: self.entries[key] for key in keys if key in self.entries}, path)


def _load_in_order(module: torch.nn.Module, loading: Load) -> None:
    if loading.assign:
        _TIES[id(loading.errors)] = {}
    try:
        _load_one(module, loading.entries, "", loading)
        if module._modules:
            _load_below(module, loading)
        _run_post_hooks(module, loading)
    finally:
        if loading.assign:
            del _TIES[id(loading.errors)]


def _load_below(module: torch.nn.Module, loading: Load) -> None:
    def enter(name: str, child: torch.nn.Module, parent: _Part) -> _Part:
        below = parent.child(name)
        _load_one(child, below.entries, below.prefix, loading)
        return below

    def leave(child: torch.nn.Module, _: object) -> None:
        _run_post_hooks(child, loading)

    descend(module, _Part(loading.entries, ""), enter, leave)


def _load_one(module: Any, entries: dict[str, Any], prefix: str, loading: Load) -> None:
    # Strict for all of them, as in torch: the caller decides about missing keys.
    module._load_from_state_dict(
        entries,
        prefix,
        loading.local_metadata(prefix),
        True,
        loading.missing,
        loading.unexpected,
        loading.errors,
    )


def _run_post_hooks(module: torch.nn.Module, loading: Load) -> None:
    if module._load_state_dict_post_hooks:
        # A hook may edit the lists, which are those of the load.
        keys = IncompatibleKeys(loading.missing, loading.unexpected)
        for hook in tuple(module._load_state_dict_post_hooks.values()):
            if hook(module, keys) is not None:
                raise AssertionError(
                    "Hooks registered with ``register_load_state_dict_post_hook`` are not "
                    "expected to return new values, if incompatible_keys need to be modified, "
                    "it should be done inplace."
                )


def _all_unexpected(module: torch.nn.Module, loading: Load) -> list[str]:
    """Return the unexpected keys in the order in which the modules would report them."""
    unexpected: list[str] = []

    def report(below: _Part, child: torch.nn.Module) -> _Part:
        # With a plan, no class sets extra state.
        extra_key = below.prefix + EXTRA_STATE_KEY
        if extra_key in below.entries:
            unexpected.append(extra_key)
        unexpected.extend(_unexpected(child, below.entries, below.prefix, own_names(child)))
        return below

    root = report(_Part(loading.entries, ""), module)
    descend(module, root, lambda name, child, parent: report(parent.child(name), child))
    return unexpected


publish("modkit", load_state_dict)
