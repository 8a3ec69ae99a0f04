"""Saving the state of a module, and of all below it, to a dict."""

import warnings
from collections import OrderedDict
from typing import Any, Final, TypeAlias

import torch

from modkit._messages import text_of
from modkit._tree import descend
from modkit.nn._overrides import is_standard, patchable, standard_classes


# A class that overrides none of these saves no more than its tensors.
_SavingClasses: Final = standard_classes("state_dict", "_save_to_state_dict", "get_extra_state")

# The prefix and the metadata of a module whose own state is written.
_Saved: TypeAlias = tuple[str, dict[str, Any]]


def _save_one(
    module: torch.nn.Module, destination: Any, path: str, prefix: str, keep_vars: bool, plain: bool
) -> dict[str, Any]:
    """Run the pre-hooks, and write one module's own state.

    With ``plain``, no override of ``_save_to_state_dict`` is called: it is written out below.

    Returns:
        The metadata of the module.
    """
    metadata = {"version": module._version}
    if hasattr(destination, "_metadata"):
        destination._metadata[path] = metadata

    if module._state_dict_pre_hooks:
        for hook in tuple(module._state_dict_pre_hooks.values()):
            hook(module, prefix, keep_vars)

    if not plain:
        module._save_to_state_dict(destination, prefix, keep_vars)
        return metadata

    for name, parameter in module._parameters.items():
        if parameter is not None:
            destination[prefix + name] = parameter if keep_vars else parameter.detach()
    buffers = module._buffers
    if buffers:
        transient = module._non_persistent_buffers_set
        for name, buffer in buffers.items():
            if buffer is not None and name not in transient:
                destination[prefix + name] = buffer if keep_vars else buffer.detach()
    return metadata


def _run_save_hooks(
    module: torch.nn.Module, destination: Any, prefix: str, metadata: dict[str, Any]
) -> Any:
    for hook in tuple(module._state_dict_hooks.values()):
        result = hook(module, destination, prefix, metadata)
        if result is not None:
            if getattr(hook, "_from_public_api", False):
                raise RuntimeError(text_of("state_dict", "state_dict post-hook"))
            destination = result
    return destination


@patchable
def state_dict(
    self: torch.nn.Module,
    *args: Any,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> Any:
    """Return the parameters, persistent buffers and extra state, here and below, by name.

    Args:
        self: The module.
        *args: ``destination``, ``prefix`` and ``keep_vars`` by position, which is deprecated.
        destination: A mapping to write into, by default a new OrderedDict whose ``_metadata`` holds
            each module's ``_version``.
        prefix: Put before each name.
        keep_vars: Keep the tensors' autograd history, and return parameters themselves.

    Returns:
        The destination, or what a hook of this module returns in its place. Tensors share memory
        with those of the module.

    Raises:
        RuntimeError: If a hook of ``register_state_dict_post_hook`` returns a value.
        RecursionError: If a module contains itself.

    Warns:
        FutureWarning: There are positional arguments.

    modkit: A hook may remove itself while it runs. A module that contains itself raises a
    RecursionError that names it.
    """
    if args:
        warnings.warn(text_of("state_dict", "Positional args"), FutureWarning, stacklevel=3)
        destination = args[0] if destination is None else destination
        prefix = args[1] if len(args) > 1 and prefix == "" else prefix
        keep_vars = args[2] if len(args) > 2 and keep_vars is False else keep_vars

    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()

    metadata = _save_one(self, destination, prefix[:-1], prefix, keep_vars, plain=False)
    if self._modules:
        _save_below(self, destination, prefix, keep_vars)
    if self._state_dict_hooks:
        return _run_save_hooks(self, destination, prefix, metadata)
    return destination


def _save_below(module: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Write the state of all modules below.

    A hook of one of them may return another destination, which torch ignores, too: all entries go
    into that of the root.
    """
    classes = _SavingClasses()

    def enter(name: str, child: Any, parent: _Saved) -> _Saved | None:
        prefix_of_parent, _ = parent
        path = prefix_of_parent + name
        child_prefix = path + "."

        plain = classes[type(child)]
        if plain:
            # Only here: what is not a module, which a table may hold, need not have a dict.
            state = child.__dict__
            plain = not ("state_dict" in state or "_save_to_state_dict" in state)
        if not plain and not is_standard(child, "state_dict"):
            child.state_dict(destination=destination, prefix=child_prefix, keep_vars=keep_vars)
            return None

        metadata = _save_one(child, destination, path, child_prefix, keep_vars, plain)
        if child._modules or child._state_dict_hooks:
            return child_prefix, metadata
        return None  # nothing is left to do for it

    def leave(child: torch.nn.Module, saved: _Saved) -> None:
        if child._state_dict_hooks:
            _run_save_hooks(child, destination, *saved)

    root: _Saved = (prefix, {})
    descend(module, root, enter, leave)
