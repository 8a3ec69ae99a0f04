"""What a module holds: its empty state, registration, and setting and deleting attributes."""

import inspect
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch.nn import Buffer, Parameter

from modkit._messages import (
    MSG_BUFFER_NOT_PERSISTENT,
    MSG_PARAMETER_NOT_LEAF,
)
from modkit._upstream import module_globals, original_methods, trace_instead
from modkit.nn._hooks import reserve_ids
from modkit.nn._overrides import TorchModule, patchable, standard


# A value of exactly one of these types can be neither Parameter, Buffer nor Module, so setting
# it needs no more than a look whether the name is registered.
# A dict, because dynamo of torch 2.8 does not know what is in a set.
_PLAIN_TYPES: Final[dict[type, None]] = dict.fromkeys(
    (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type(None))
)

# What the hot functions compare with: a global is read in half the time of an entry of a dict.
_TORCH_INIT: Final = original_methods["__init__"]
_TORCH_SETATTR: Final = original_methods["__setattr__"]
_TORCH_DELATTR: Final = original_methods["__delattr__"]
_TORCH_SETSTATE: Final = original_methods["__setstate__"]
_TORCH_REGISTER_PARAMETER: Final = original_methods["register_parameter"]
_TORCH_REGISTER_BUFFER: Final = original_methods["register_buffer"]
_TORCH_ADD_MODULE: Final = original_methods["add_module"]


def fill(state: dict[str, Any]) -> None:
    """Enter the attributes of a module that holds nothing yet into its dict, in torch's order."""
    state["training"] = True
    state["_parameters"] = {}
    state["_buffers"] = {}
    state["_non_persistent_buffers_set"] = set()
    state["_backward_pre_hooks"] = OrderedDict()
    state["_backward_hooks"] = OrderedDict()
    state["_is_full_backward_hook"] = None
    state["_forward_hooks"] = OrderedDict()
    state["_forward_hooks_with_kwargs"] = OrderedDict()
    state["_forward_hooks_always_called"] = OrderedDict()
    state["_forward_pre_hooks"] = OrderedDict()
    state["_forward_pre_hooks_with_kwargs"] = OrderedDict()
    state["_state_dict_hooks"] = OrderedDict()
    state["_state_dict_pre_hooks"] = OrderedDict()
    state["_load_state_dict_pre_hooks"] = OrderedDict()
    state["_load_state_dict_post_hooks"] = OrderedDict()
    state["_modules"] = {}


# A member of such a name would take the place of what makes the module work.
_RESERVED: Final = frozenset(vars(TorchModule()))


@standard
def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
    """Create the empty state; with ``call_super_init``, pass the arguments on.

    Whatever is not the plain case is left to torch: arguments, and a class behind torch's in the
    order of bases, whose ``__setattr__`` sees the state being set.
    """
    if (
        args
        or kwargs
        or self.call_super_init
        or type(self).__mro__[-2] is not TorchModule
        or TorchModule.__init__ is not _TORCH_INIT
    ):
        TorchModule.__init__(self, *args, **kwargs)
    else:
        fill(self.__dict__)


def _init_in_graph(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Create the state in compiled code, for which dynamo has patched torch's function."""
    _TORCH_INIT(self, *args, **kwargs)


trace_instead(__init__, _init_in_graph)


@standard
def __setstate__(self: torch.nn.Module, state: dict[str, Any]) -> None:  # noqa: N807
    """Restore a pickled state, those of older torch releases included.

    The ids of the hooks in it are kept from being given to new ones.
    """
    own = self.__dict__
    if TorchModule.__setstate__ is not _TORCH_SETSTATE:
        TorchModule.__setstate__(self, state)
        reserve_ids(own)
        return
    own.update(state)
    try:
        _ = own["_forward_pre_hooks_with_kwargs"], own["_forward_hooks_with_kwargs"]
        _ = own["_forward_hooks_always_called"], own["_non_persistent_buffers_set"]
        hooked = (
            own["_is_full_backward_hook"]
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or own["_state_dict_hooks"]
            or own["_state_dict_pre_hooks"]
            or own["_load_state_dict_pre_hooks"]
            or own["_load_state_dict_post_hooks"]
        )
    except KeyError:
        # Torch adds what states of older releases lack.
        TorchModule.__setstate__(self, {})
        hooked = True
    if hooked:
        reserve_ids(own)


def _announce(kind: str, module: torch.nn.Module, name: str, value: Any) -> Any:
    """Let the global registration hooks see, and perhaps replace, a new member.

    What they return is checked like what was to be registered, or it would be stored unseen and
    fail far from here.
    """
    hooks: Mapping[int, Any] = getattr(module_globals, f"_global_{kind}_registration_hooks")
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
    "module": ("torch.nn.Module", lambda value: isinstance(value, TorchModule)),
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


@standard
def register_parameter(self: torch.nn.Module, name: str, param: Parameter | None) -> None:
    """Register ``param`` as the parameter ``name``; None keeps the name free of a tensor.

    Raises:
        TypeError: ``param`` is not a parameter, or ``name`` is not a string.
        KeyError: ``name`` is empty, has a dot, or is an attribute that is not a parameter.
        ValueError: ``param`` was computed, so it is not a leaf of the autograd graph.
    """
    if TorchModule.register_parameter is not _TORCH_REGISTER_PARAMETER:
        TorchModule.register_parameter(self, name, param)
        return
    parameters = self.__dict__.get("_parameters")
    if parameters is None:
        raise AttributeError("cannot assign parameter before Module.__init__() call")
    _refuse_name(self, "parameter", name, parameters)
    if param is not None:
        if not isinstance(cast("object", param), Parameter):
            raise TypeError(
                f"cannot assign '{torch.typename(param)}' object to parameter '{name}' "
                "(torch.nn.Parameter or None required)"
            )
        if param.grad_fn:
            raise ValueError(MSG_PARAMETER_NOT_LEAF.format(name=name))
        if module_globals._global_parameter_registration_hooks:
            param = _announce("parameter", self, name, param)
    parameters[name] = param


@standard
def register_buffer(
    self: torch.nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
) -> None:
    """Register ``tensor`` as the buffer ``name``, part of the state dict if ``persistent``.

    Raises:
        TypeError: ``tensor`` is not a tensor, or ``name`` is not a string.
        KeyError: ``name`` is empty, has a dot, or is an attribute that is not a buffer.
    """
    if TorchModule.register_buffer is not _TORCH_REGISTER_BUFFER:
        TorchModule.register_buffer(self, name, tensor, persistent)
        return
    buffers = self.__dict__.get("_buffers")
    if buffers is None:
        raise AttributeError("cannot assign buffer before Module.__init__() call")
    _refuse_name(self, "buffer", name, buffers)
    if not _is_buffer_like(tensor):
        raise TypeError(
            f"cannot assign '{torch.typename(tensor)}' object to buffer '{name}' "
            "(torch Tensor or None required)"
        )
    if module_globals._global_buffer_registration_hooks:
        tensor = _announce("buffer", self, name, tensor)
    buffers[name] = tensor
    if persistent:
        self._non_persistent_buffers_set.discard(name)
    else:
        self._non_persistent_buffers_set.add(name)


@standard
def add_module(self: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Register ``module`` as the child ``name``.

    Raises:
        TypeError: ``module`` is neither a module nor None, or ``name`` is not a string.
        KeyError: ``name`` is empty, has a dot, or is an attribute that is not a child.
    """
    if TorchModule.add_module is not _TORCH_ADD_MODULE:
        TorchModule.add_module(self, name, module)
        return
    if not isinstance(module, TorchModule) and module is not None:
        raise TypeError(f"{torch.typename(module)} is not a Module subclass")
    if not isinstance(cast("object", name), str):
        raise TypeError(f"module name should be a string. Got {torch.typename(name)}")
    if hasattr(self, name) and name not in self._modules:
        raise KeyError(f"attribute '{name}' already exists")
    if "." in name:
        raise KeyError(f'module name can\'t contain ".", got: {name}')
    if name == "":
        raise KeyError('module name can\'t be empty string ""')
    if module_globals._global_module_registration_hooks:
        module = _announce("module", self, name, module)
    self._modules[name] = module


@standard
def __setattr__(self: torch.nn.Module, name: str, value: Any) -> None:  # noqa: N807
    """Register parameters, buffers and modules; set anything else as usual."""
    if TorchModule.__setattr__ is not _TORCH_SETATTR:
        TorchModule.__setattr__(self, name, value)
        return
    own = self.__dict__
    if type(value) in _PLAIN_TYPES:
        registered = (
            name in own.get("_parameters", ())
            or name in own.get("_buffers", ())
            or name in own.get("_modules", ())
        )
    else:
        registered = True
    if not registered or not _set_member(self, own, name, value):
        super(TorchModule, self).__setattr__(name, value)


def _set_member(module: torch.nn.Module, state: dict[str, Any], name: str, value: Any) -> bool:
    """Register ``value`` if it is a member or replaces one; return False for a plain attribute."""
    parameters = state.get("_parameters")
    if isinstance(value, Parameter):
        if parameters is None:
            raise AttributeError("cannot assign parameters before Module.__init__() call")
        _set_parameter(module, state, name, value)
    elif parameters is not None and name in parameters:
        if value is not None:
            raise TypeError(
                f"cannot assign '{torch.typename(value)}' as parameter '{name}' "
                "(torch.nn.Parameter or None expected)"
            )
        module.register_parameter(name, value)
    elif isinstance(value, TorchModule):
        if "_modules" not in state:
            raise AttributeError("cannot assign module before Module.__init__() call")
        _set_module(module, state, name, value)
    elif name in state.get("_modules", ()):
        if value is not None:
            raise TypeError(
                f"cannot assign '{torch.typename(value)}' as child module '{name}' "
                "(torch.nn.Module or None expected)"
            )
        module._modules[name] = _announce("module", module, name, value)
    elif isinstance(value, Buffer) or name in state.get("_buffers", ()):
        _set_buffer(module, name, value)
    else:
        return False
    return True


def _set_parameter(
    module: torch.nn.Module, state: dict[str, Any], name: str, value: Parameter
) -> None:
    holders = (state, module._buffers, module._modules)
    names = module._non_persistent_buffers_set
    if name in state or name in holders[1] or name in holders[2] or name in names:
        _replace(name, holders, names, lambda: module.register_parameter(name, value))
    else:
        module.register_parameter(name, value)


def _set_module(
    module: torch.nn.Module, state: dict[str, Any], name: str, value: torch.nn.Module
) -> None:
    holders = (state, module._parameters, module._buffers)
    names = module._non_persistent_buffers_set
    if name in state or name in holders[1] or name in holders[2] or name in names:
        _replace(name, holders, names, lambda: _store_module(module, name, value))
    else:
        _store_module(module, name, value)


def _store_module(module: torch.nn.Module, name: str, value: torch.nn.Module) -> None:
    if module_globals._global_module_registration_hooks:
        value = _announce("module", module, name, value)
    module._modules[name] = value


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
    ours = type(module).register_buffer is register_buffer
    if (ours and "register_buffer" not in module.__dict__) or (
        "persistent" in inspect.signature(register).parameters
    ):
        register(name, value, persistent)
    elif persistent:
        # An override from before the argument existed always registers a persistent buffer.
        register(name, value)
    else:
        raise RuntimeError(MSG_BUFFER_NOT_PERSISTENT)


@standard
def __delattr__(self: torch.nn.Module, name: str) -> None:  # noqa: N807
    """Delete a registered name or a plain attribute."""
    if TorchModule.__delattr__ is not _TORCH_DELATTR:
        TorchModule.__delattr__(self, name)
        return
    parameters = self.__dict__.get("_parameters")
    if parameters is None:
        raise AttributeError(f"cannot delete attribute '{name}' before Module.__init__() call")
    if name in parameters:
        del parameters[name]
    elif name in self._buffers:
        del self._buffers[name]
        self._non_persistent_buffers_set.discard(name)
    elif name in self._modules:
        del self._modules[name]
    else:
        super(TorchModule, self).__delattr__(name)


@patchable
def set_submodule(
    self: torch.nn.Module, target: str, module: torch.nn.Module, strict: bool = False
) -> None:
    """Put ``module`` at the path ``target``; with ``strict`` only in the place of another one.

    Raises:
        ValueError: ``target`` is empty or ``module`` is not a module.
        AttributeError: the parent does not exist, or the name is something else.
    """
    if target == "":
        raise ValueError("Cannot set the submodule without a target name!")
    *path, name = target.split(".")
    if not isinstance(cast("object", module), TorchModule):
        raise ValueError(  # noqa: TRY004 - torch's type
            f"`module` is not an nn.Module, found {type(module)}"
        )
    parent = self.get_submodule(".".join(path)) if path else self
    if strict and not hasattr(parent, name):
        raise AttributeError(f"{parent._get_name()} has no attribute `{name}`")
    if (
        hasattr(parent, name)
        and not isinstance(getattr(parent, name), TorchModule)
        and (strict or not _is_unset(parent, name))
    ):
        raise AttributeError(f"`{name}` is not an nn.Module")
    setattr(parent, name, module)


def _is_unset(module: torch.nn.Module, name: str) -> bool:
    """Return True if ``name`` is a child or a plain attribute that is None."""
    if hasattr(type(module), name):
        return False
    return module._modules.get(name, module) is None or module.__dict__.get(name, module) is None
