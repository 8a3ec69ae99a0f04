"""What a module holds: fresh state, registration, and attribute access by name."""

import inspect
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch.nn import Buffer, Parameter

from modkit._errors import MSG_BUFFER_NOT_PERSISTENT, MSG_PARAMETER_NOT_LEAF
from modkit._upstream import (
    global_buffer_registration_hooks,
    global_module_registration_hooks,
    global_parameter_registration_hooks,
    original_methods,
)
from modkit.nn._hook_entries import reserve_ids
from modkit.nn._tree import is_standard


# A value of exactly one of these types can be neither Parameter, Buffer nor Module, so setting
# it needs no more than a look whether the name is registered.
PLAIN_TYPES: Final = frozenset(
    {bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type(None)}
)

# What unpickling fills in for states that older releases of torch wrote, in torch's order.
_ADDED_SINCE_FIRST_PICKLES: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_backward_pre_hooks",
)


def fill(module: object) -> None:
    """Set the attributes of a module that holds nothing yet, in torch's order.

    One by one, and not through its dict: an instance whose dict nobody has asked for takes less
    memory, and shares the keys with all others of its class.
    """
    put = object.__setattr__
    put(module, "training", True)
    put(module, "_parameters", {})
    put(module, "_buffers", {})
    put(module, "_non_persistent_buffers_set", set())
    put(module, "_backward_pre_hooks", OrderedDict())
    put(module, "_backward_hooks", OrderedDict())
    put(module, "_is_full_backward_hook", None)
    put(module, "_forward_hooks", OrderedDict())
    put(module, "_forward_hooks_with_kwargs", OrderedDict())
    put(module, "_forward_hooks_always_called", OrderedDict())
    put(module, "_forward_pre_hooks", OrderedDict())
    put(module, "_forward_pre_hooks_with_kwargs", OrderedDict())
    put(module, "_state_dict_hooks", OrderedDict())
    put(module, "_state_dict_pre_hooks", OrderedDict())
    put(module, "_load_state_dict_pre_hooks", OrderedDict())
    put(module, "_load_state_dict_post_hooks", OrderedDict())
    put(module, "_modules", {})


class _Blank: ...


def _fresh_state() -> dict[str, Any]:
    blank = _Blank()
    fill(blank)
    return vars(blank)


# A member of such a name would take the place of what makes the module work.
_RESERVED: Final = frozenset(_fresh_state())


def complete_state(state: dict[str, Any]) -> None:
    """Add to an unpickled state the hook tables that did not exist when it was written.

    The ids of the hooks in it are kept from being given to new ones.
    """
    fresh = _fresh_state()
    for name in _ADDED_SINCE_FIRST_PICKLES:
        if name not in state:
            state[name] = fresh[name]
    reserve_ids(state)


def refuse_arguments(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise for arguments that ``Module.__init__`` takes only with ``call_super_init``."""
    name = type(module).__name__
    if kwargs:
        raise TypeError(
            f"{name}.__init__() got an unexpected keyword argument '{next(iter(kwargs))}'"
        )
    if args:
        raise TypeError(
            f"{name}.__init__() takes 1 positional argument but {len(args) + 1} were given"
        )


def _announce(
    kind: str, hooks: Mapping[int, Any], module: torch.nn.Module, name: str, value: Any
) -> Any:
    """Let the global registration hooks see, and perhaps replace, a new member.

    What they return is checked like what was to be registered, or it would be stored unseen and
    fail far from here.
    """
    if not hooks:
        return value
    result = value
    for hook in tuple(hooks.values()):
        replacement = hook(module, name, result)
        if replacement is not None:
            result = replacement
    expected, accepts = _ACCEPTED[kind]
    if result is not value and not accepts(result):
        raise TypeError(
            f"cannot assign '{torch.typename(result)}' object to {kind} '{name}' of "
            f"{module._get_name()} ({expected} required): a registration hook returned "
            f"{reprlib.repr(result)}"
        )
    return result


def _is_buffer_like(value: object) -> bool:
    return value is None or isinstance(value, torch.Tensor) or hasattr(value, "__torch_function__")


# What registration hooks may return for each kind of member.
_ACCEPTED: Final[dict[str, tuple[str, Callable[[object], bool]]]] = {
    "parameter": ("torch.nn.Parameter", lambda value: isinstance(value, Parameter)),
    "buffer": ("torch.Tensor", _is_buffer_like),
    "module": ("torch.nn.Module", lambda value: isinstance(value, torch.nn.Module)),
}


def _refuse_name(
    module: torch.nn.Module, kind: str, name: object, registered: Mapping[str, Any]
) -> None:
    """Raise if ``name`` cannot be a new or a replaced entry of ``registered``."""
    if not isinstance(name, str):
        raise TypeError(f"{kind} name should be a string. Got {torch.typename(name)}")
    if "." in name:
        raise KeyError(f'{kind} name can\'t contain "."')
    if name == "":
        raise KeyError(f'{kind} name can\'t be empty string ""')
    if hasattr(module, name) and name not in registered:
        raise KeyError(f"attribute '{name}' already exists")


def register_parameter(module: torch.nn.Module, name: str, parameter: Parameter | None) -> None:
    """Register ``parameter`` as ``name``; nothing is stored unless all checks and hooks pass."""
    if torch.nn.Module.register_parameter is not original_methods["register_parameter"]:
        torch.nn.Module.register_parameter(module, name, parameter)
        return
    if "_parameters" not in module.__dict__:
        raise AttributeError("cannot assign parameter before Module.__init__() call")
    _refuse_name(module, "parameter", name, module._parameters)
    if parameter is not None:
        if not isinstance(cast("object", parameter), Parameter):
            raise TypeError(
                f"cannot assign '{torch.typename(parameter)}' object to parameter '{name}' "
                "(torch.nn.Parameter or None required)"
            )
        if parameter.grad_fn:
            raise ValueError(MSG_PARAMETER_NOT_LEAF.format(name=name))
        parameter = _announce(
            "parameter", global_parameter_registration_hooks, module, name, parameter
        )
    module._parameters[name] = parameter


def register_buffer(
    module: torch.nn.Module, name: str, buffer: torch.Tensor | None, persistent: bool
) -> None:
    """Register ``buffer`` as ``name``; nothing is stored unless all checks and hooks pass."""
    if torch.nn.Module.register_buffer is not original_methods["register_buffer"]:
        torch.nn.Module.register_buffer(module, name, buffer, persistent)
        return
    if "_buffers" not in module.__dict__:
        raise AttributeError("cannot assign buffer before Module.__init__() call")
    _refuse_name(module, "buffer", name, module._buffers)
    if not _is_buffer_like(buffer):
        raise TypeError(
            f"cannot assign '{torch.typename(buffer)}' object to buffer '{name}' "
            "(torch Tensor or None required)"
        )
    module._buffers[name] = _announce(
        "buffer", global_buffer_registration_hooks, module, name, buffer
    )
    if persistent:
        module._non_persistent_buffers_set.discard(name)
    else:
        module._non_persistent_buffers_set.add(name)


def add_module(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """Register ``child`` as ``name``; nothing is stored unless all checks and hooks pass."""
    if not isinstance(child, torch.nn.Module) and child is not None:
        raise TypeError(f"{torch.typename(child)} is not a Module subclass")
    if not isinstance(cast("object", name), str):
        raise TypeError(f"module name should be a string. Got {torch.typename(name)}")
    if hasattr(module, name) and name not in module._modules:
        raise KeyError(f"attribute '{name}' already exists")
    if "." in name:
        raise KeyError(f'module name can\'t contain ".", got: {name}')
    if name == "":
        raise KeyError('module name can\'t be empty string ""')
    _store_module(module, name, child)


def _replace(
    name: str,
    mappings: tuple[dict[str, Any], ...],
    names: set[str],
    register: Callable[[], None],
) -> None:
    """Take ``name`` out of the mappings and the set, register, and put all back on failure.

    Torch deletes first and validates later, so a refused assignment loses the old member.
    """
    if name in _RESERVED:
        raise KeyError(f"attribute '{name}' already exists")
    displaced: list[tuple[dict[str, Any], Any, list[str]]] = []
    for mapping in mappings:
        if name in mapping:
            order = list(mapping)
            displaced.append((mapping, mapping[name], order[order.index(name) + 1 :]))
            del mapping[name]
    was_named = name in names
    names.discard(name)
    try:
        register()
    except BaseException:
        for mapping, value, followers in displaced:
            mapping[name] = value
            for follower in followers:
                if follower in mapping:
                    mapping[follower] = mapping.pop(follower)
        if was_named:
            names.add(name)
        raise


def _set_parameter(module: torch.nn.Module, name: str, value: Parameter) -> None:
    holders = (module.__dict__, module._buffers, module._modules)
    names = module._non_persistent_buffers_set
    if name in holders[0] or name in holders[1] or name in holders[2] or name in names:
        _replace(name, holders, names, lambda: module.register_parameter(name, value))
    else:
        module.register_parameter(name, value)


def _store_module(module: torch.nn.Module, name: str, value: torch.nn.Module | None) -> None:
    module._modules[name] = _announce(
        "module", global_module_registration_hooks, module, name, value
    )


def _set_module(module: torch.nn.Module, name: str, value: torch.nn.Module) -> None:
    holders = (module.__dict__, module._parameters, module._buffers)
    names = module._non_persistent_buffers_set
    if name in holders[0] or name in holders[1] or name in holders[2] or name in names:
        _replace(name, holders, names, lambda: _store_module(module, name, value))
    else:
        _store_module(module, name, value)


def _set_buffer(module: torch.nn.Module, name: str, value: Any) -> None:
    if not _is_buffer_like(value):
        raise TypeError(
            f"cannot assign '{torch.typename(value)}' as buffer '{name}' "
            "(torch.nn.Buffer, torch.Tensor or None expected)"
        )
    if isinstance(value, Buffer):
        persistent = bool(value.persistent)
    else:
        persistent = name not in module._non_persistent_buffers_set
    register = module.register_buffer
    if (
        is_standard(module, "register_buffer")
        or "persistent" in inspect.signature(register).parameters
    ):
        register(name, value, persistent)
    elif persistent:
        # An override from before the argument existed always registers a persistent buffer.
        register(name, value)
    else:
        raise RuntimeError(MSG_BUFFER_NOT_PERSISTENT)


def set_member(module: torch.nn.Module, name: str, value: Any) -> bool:
    """Register ``value`` if it is a member or replaces one; return False for a plain attribute."""
    state = module.__dict__
    parameters = state.get("_parameters")
    if isinstance(value, Parameter):
        if parameters is None:
            raise AttributeError("cannot assign parameters before Module.__init__() call")
        _set_parameter(module, name, value)
    elif parameters is not None and name in parameters:
        if value is not None:
            raise TypeError(
                f"cannot assign '{torch.typename(value)}' as parameter '{name}' "
                "(torch.nn.Parameter or None expected)"
            )
        module.register_parameter(name, value)
    elif isinstance(value, torch.nn.Module):
        if "_modules" not in state:
            raise AttributeError("cannot assign module before Module.__init__() call")
        _set_module(module, name, value)
    elif name in state.get("_modules", ()):
        if value is not None:
            raise TypeError(
                f"cannot assign '{torch.typename(value)}' as child module '{name}' "
                "(torch.nn.Module or None expected)"
            )
        _store_module(module, name, value)
    elif isinstance(value, Buffer) or name in state.get("_buffers", ()):
        _set_buffer(module, name, value)
    else:
        return False
    return True


def holds(module: torch.nn.Module, name: str) -> bool:
    """Tell whether ``name`` is registered, as parameter, buffer or module, a None slot included."""
    state = module.__dict__
    return (
        name in state.get("_parameters", ())
        or name in state.get("_buffers", ())
        or name in state.get("_modules", ())
    )


def delete_member(module: torch.nn.Module, name: str) -> bool:
    """Delete the registered ``name``; return False where it is none."""
    try:
        parameters = module._parameters
    except AttributeError:
        message = f"cannot delete attribute '{name}' before Module.__init__() call"
        raise AttributeError(message) from None
    if name in parameters:
        del parameters[name]
    elif name in module._buffers:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
    elif name in module._modules:
        del module._modules[name]
    else:
        return False
    return True


def _require(module: torch.nn.Module, name: str) -> Any:
    if not hasattr(module, name):
        raise AttributeError(f"{module._get_name()} has no attribute `{name}`")
    return getattr(module, name)


def _require_module(module: torch.nn.Module, name: str) -> torch.nn.Module:
    found = _require(module, name)
    if not isinstance(found, torch.nn.Module):
        raise AttributeError(f"`{name}` is not an nn.Module")  # noqa: TRY004 - torch's type
    return found


def get_submodule(module: torch.nn.Module, target: str) -> torch.nn.Module:
    """Follow the dotted path ``target``; the empty path is ``module`` itself."""
    if target == "":
        return module
    found = module
    for name in target.split("."):
        found = _require_module(found, name)
    return found


def _is_unset(module: torch.nn.Module, name: str) -> bool:
    """Tell whether ``name`` is a child or a plain attribute that is None."""
    if hasattr(type(module), name):
        return False
    return module._modules.get(name, module) is None or module.__dict__.get(name, module) is None


def set_submodule(
    module: torch.nn.Module, target: str, replacement: torch.nn.Module, strict: bool
) -> None:
    """Put ``replacement`` at the dotted path ``target``, whose parent must exist."""
    if target == "":
        raise ValueError("Cannot set the submodule without a target name!")
    *path, name = target.split(".")
    if not isinstance(cast("object", replacement), torch.nn.Module):
        raise ValueError(  # noqa: TRY004 - torch's type
            f"`module` is not an nn.Module, found {type(replacement)}"
        )
    parent = module.get_submodule(".".join(path)) if path else module
    if strict or (hasattr(parent, name) and not _is_unset(parent, name)):
        _require_module(parent, name)
    setattr(parent, name, replacement)


def get_parameter(module: torch.nn.Module, target: str) -> Parameter:
    """Return the parameter at the dotted path ``target``."""
    path, _, name = target.rpartition(".")
    found = _require(module.get_submodule(path), name)
    if not isinstance(found, Parameter):
        raise AttributeError(f"`{name}` is not an nn.Parameter")  # noqa: TRY004 - torch's type
    return found


def get_buffer(module: torch.nn.Module, target: str) -> torch.Tensor:
    """Return the buffer at the dotted path ``target``."""
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    found: torch.Tensor = _require(owner, name)
    if name not in owner._buffers:
        raise AttributeError(f"`{name}` is not a buffer")
    return found
