"""Saving a module's state to a dict, and loading it back."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.nn import Parameter

from modkit._errors import (
    MSG_LOAD_FAILED,
    MSG_LOAD_NOT_A_TENSOR,
    MSG_LOAD_POST_HOOK_RETURN,
    MSG_LOAD_SIZE,
    MSG_META_COPY,
    MSG_MODULE_LOAD_ALIAS,
    MSG_STATE_DICT_HOOK_RETURN,
    MSG_STATE_DICT_POSITIONAL,
)
from modkit._upstream import EXTRA_STATE_KEY, IncompatibleKeys
from modkit.nn._tree import is_standard, method_of_module, refuse_cycle


def _overrides(module: torch.nn.Module, method: str) -> bool:
    """Tell whether the class implements an extra-state method; the instance does not count."""
    inherited = getattr(torch.nn.Module, method)
    return getattr(type(module), method, inherited) is not inherited


# --- saving --------------------------------------------------------------------------------------


def positional_arguments(
    args: tuple[Any, ...], destination: Any, prefix: str, keep_vars: bool
) -> tuple[Any, str, bool]:
    """Merge the deprecated positional form of ``state_dict`` into the keywords, with a warning."""
    warnings.warn(MSG_STATE_DICT_POSITIONAL, FutureWarning, stacklevel=3)
    if destination is None:
        destination = args[0]
    if len(args) > 1 and prefix == "":
        prefix = args[1]
    if len(args) > 2 and keep_vars is False:
        keep_vars = args[2]
    return destination, prefix, keep_vars


@method_of_module
def _save_to_state_dict(
    self: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool
) -> None:
    """Write the parameters, persistent buffers and extra state of one module, not below it.

    This function is itself the method ``Module._save_to_state_dict``, which classes may override.
    """
    for name, parameter in self._parameters.items():
        if parameter is not None:
            destination[prefix + name] = parameter if keep_vars else parameter.detach()
    for name, buffer in self._buffers.items():
        if buffer is not None and name not in self._non_persistent_buffers_set:
            destination[prefix + name] = buffer if keep_vars else buffer.detach()
    if _overrides(self, "get_extra_state"):
        destination[prefix + EXTRA_STATE_KEY] = self.get_extra_state()


def _save_one(
    module: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool
) -> dict[str, Any]:
    """Run the pre-hooks and write one module's own state; return its metadata."""
    metadata = {"version": module._version}
    if hasattr(destination, "_metadata"):
        destination._metadata[prefix[:-1]] = metadata
    if module._state_dict_pre_hooks:
        for hook in tuple(module._state_dict_pre_hooks.values()):
            hook(module, prefix, keep_vars)
    module._save_to_state_dict(destination, prefix, keep_vars)
    return metadata


def _run_save_hooks(
    module: torch.nn.Module, destination: Any, prefix: str, metadata: dict[str, Any]
) -> Any:
    for hook in tuple(module._state_dict_hooks.values()):
        result = hook(module, destination, prefix, metadata)
        if result is None:
            continue
        if getattr(hook, "_from_public_api", False):
            raise RuntimeError(MSG_STATE_DICT_HOOK_RETURN)
        destination = result
    return destination


def save(module: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Write the state of ``module`` and all below it; return where it was written.

    Only the root may replace the destination, through a private hook that returns another one.
    """
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()
    metadata = _save_one(module, destination, prefix, keep_vars)
    active = {id(module)}
    stack = [(module, prefix, metadata, iter(module._modules.items()))]
    while True:
        parent, parent_prefix, metadata, children = stack[-1]
        for name, child in children:
            if child is None:
                continue
            path = parent_prefix + name + "."
            if not is_standard(child, "state_dict"):
                child.state_dict(destination=destination, prefix=path, keep_vars=keep_vars)
                continue
            if id(child) in active:
                refuse_cycle(child)
            child_metadata = _save_one(child, destination, path, keep_vars)
            if child._modules:
                active.add(id(child))
                stack.append((child, path, child_metadata, iter(child._modules.items())))
                break
            if child._state_dict_hooks:
                _run_save_hooks(child, destination, path, child_metadata)
        else:
            stack.pop()
            active.discard(id(parent))
            written = _run_save_hooks(parent, destination, parent_prefix, metadata)
            if not stack:
                return written


# --- loading -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """The three lists that all modules, their overrides and their hooks share during a load."""

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])


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
    targets: dict[str, torch.Tensor] = {
        name: tensor for name, tensor in self._parameters.items() if tensor is not None
    }
    targets |= {
        name: buffer
        for name, buffer in self._buffers.items()
        if buffer is not None and name not in self._non_persistent_buffers_set
    }
    assign = local_metadata.get("assign_to_params_buffers", False)
    for name, target in targets.items():
        key = prefix + name
        if key in state_dict:
            problem = _load_tensor(self, name, target, key, state_dict[key], assign=assign)
            if problem is not None:
                error_msgs.append(problem)
        elif strict:
            missing_keys.append(key)
    extra_key = prefix + EXTRA_STATE_KEY
    if _overrides(self, "set_extra_state"):
        if extra_key in state_dict:
            self.set_extra_state(state_dict[extra_key])
        elif strict:
            missing_keys.append(extra_key)
    elif strict and extra_key in state_dict:
        unexpected_keys.append(extra_key)
    if strict:
        _report_unexpected(self, state_dict, prefix, targets, extra_key, unexpected_keys)


def _report_unexpected(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    targets: dict[str, torch.Tensor],
    extra_key: str,
    unexpected_keys: list[str],
) -> None:
    """Report each key below ``prefix`` that is neither ours nor that of a child."""
    start = len(prefix)
    for key in state_dict:
        if not key.startswith(prefix) or key == extra_key:
            continue
        name, dot, _ = key[start:].partition(".")
        if name not in (module._modules if dot else targets):
            unexpected_keys.append(key)


def _load_tensor(
    module: torch.nn.Module,
    name: str,
    target: torch.Tensor,
    key: str,
    value: Any,
    *,
    assign: bool,
) -> str | None:
    """Load one entry; return what is wrong with it, or None."""
    if not torch.overrides.is_tensor_like(value):
        return MSG_LOAD_NOT_A_TENSOR.format(key=key, kind=type(value))
    # An uninitialized parameter has no shape to compare; its module's own hook has materialized
    # it if the checkpoint holds a real tensor.
    if not torch.nn.parameter.is_lazy(target):
        # Checkpoints from before torch 0.4 hold scalars as one element.
        if len(target.shape) == 0 and len(value.shape) == 1 and value.shape[0] == 1:
            value = value[0]
        if value.shape != target.shape:
            return MSG_LOAD_SIZE.format(key=key, theirs=value.shape, ours=target.shape)
    if target.is_meta and not value.is_meta and not assign:
        warnings.warn(MSG_META_COPY.format(key=key), stacklevel=5)
    swap = torch.__future__.get_swap_module_params_on_conversion()
    try:
        with torch.no_grad():
            if swap:
                _swap_in(target, value, assign=assign)
            elif assign:
                _assign(module, name, target, value)
            else:
                target.copy_(value)
    except Exception as error:  # noqa: BLE001 - all problems are reported together
        return MSG_LOAD_FAILED.format(
            action="swapping" if swap else "copying",
            key=key,
            ours=target.size(),
            theirs=value.size(),
            reason=error.args,
        )
    return None


def _as_parameter(value: torch.Tensor, *, requires_grad: bool) -> Parameter:
    if isinstance(value, Parameter):
        value.requires_grad_(requires_grad)
        return value
    return Parameter(value, requires_grad=requires_grad)


def _assign(module: torch.nn.Module, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, Parameter):
        value = _as_parameter(value, requires_grad=target.requires_grad)
    setattr(module, name, value)


def _swap_in(target: torch.Tensor, value: torch.Tensor, *, assign: bool) -> None:
    loaded = target.module_load(value, assign=assign)
    if loaded is value or loaded is target:
        raise RuntimeError(MSG_MODULE_LOAD_ALIAS)
    if isinstance(target, Parameter):
        loaded = _as_parameter(loaded, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, loaded)


@dataclass(slots=True)
class _Loading:
    """A module whose children are being loaded."""

    module: torch.nn.Module
    state_dict: dict[str, Any]
    prefix: str
    children: Iterator[tuple[str, torch.nn.Module | None]]
    parts: dict[str, dict[str, Any]] | None = None

    def part_for(self, name: str) -> dict[str, Any]:
        """Return the entries below the child ``name`` in a dict of its own.

        All keys are sorted into their children at once: testing each key against each child, as
        torch does, takes time that grows with the square of the number of siblings.
        """
        if "." in name:
            # ``setattr`` accepts such a name, and its keys look like those of another child.
            path = self.prefix + name + "."
            return {key: value for key, value in self.state_dict.items() if key.startswith(path)}
        if self.parts is None:
            self.parts = {}
            start = len(self.prefix)
            for key, value in self.state_dict.items():
                if key.startswith(self.prefix):
                    head, dot, _ = key[start:].partition(".")
                    if dot:
                        self.parts.setdefault(head, {})[key] = value
        return self.parts.pop(name, {})


def _begin_loading(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any] | None,
    assign: bool,
    report: _Report,
) -> _Loading:
    # A copy, so that the flag does not stay behind in the caller's state dict.
    local = {} if metadata is None else dict(metadata.get(prefix[:-1], {}))
    if assign:
        local["assign_to_params_buffers"] = assign
    module._load_from_state_dict(
        state_dict, prefix, local, True, report.missing, report.unexpected, report.errors
    )
    return _Loading(module, state_dict, prefix, iter(module._modules.items()))


def _finish_loading(module: torch.nn.Module, report: _Report) -> None:
    keys = IncompatibleKeys(report.missing, report.unexpected)
    for hook in tuple(module._load_state_dict_post_hooks.values()):
        if hook(module, keys) is not None:
            raise AssertionError(MSG_LOAD_POST_HOOK_RETURN)


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def load(
    module: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool, assign: bool
) -> IncompatibleKeys:
    """Load ``state_dict`` into ``module`` and all below it, parents first."""
    if not isinstance(cast("object", state_dict), Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    metadata = getattr(state_dict, "_metadata", None)
    # Hooks and overrides may edit what they are given, so they are given a copy.
    entries: Any = OrderedDict(state_dict)
    if metadata is not None:
        entries._metadata = metadata
    report = _Report()
    active = {id(module)}
    stack = [_begin_loading(module, entries, "", metadata, assign, report)]
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
            stack.append(_begin_loading(child, part, path, metadata, assign, report))
            break
        else:
            stack.pop()
            active.discard(id(parent.module))
            _finish_loading(parent.module, report)
    errors = report.errors
    if strict and report.unexpected:
        errors.insert(0, f"Unexpected key(s) in state_dict: {_quoted(report.unexpected)}. ")
    if strict and report.missing:
        errors.insert(0, f"Missing key(s) in state_dict: {_quoted(report.missing)}. ")
    if errors:
        listed = "\n\t".join(errors)
        message = f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}"
        raise RuntimeError(message)
    return IncompatibleKeys(report.missing, report.unexpected)
