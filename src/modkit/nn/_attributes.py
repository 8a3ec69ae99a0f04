"""The members of a module: its empty state, registration, setting and deleting attributes."""

import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch.nn import Buffer, Parameter

from modkit._upstream import module_globals, original_methods, trace_instead
from modkit.nn._hooks import TABLES, reserve_ids
from modkit.nn._overrides import TorchModule, patchable, standard


# A value of exactly one of these types is neither Parameter, Buffer nor Module, so setting it only
# requires a check whether the name is registered. A dict, because dynamo of torch 2.8 does not know
# what is in a set.
_PLAIN_TYPES: Final[dict[type, None]] = dict.fromkeys(
    (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type(None))
)

# A global is read in half the time of an entry of a dict.
_TORCH_INIT: Final = original_methods["__init__"]
_TORCH_SETATTR: Final = original_methods["__setattr__"]
_TORCH_DELATTR: Final = original_methods["__delattr__"]
_TORCH_SETSTATE: Final = original_methods["__setstate__"]
_TORCH_REGISTER_PARAMETER: Final = original_methods["register_parameter"]
_TORCH_REGISTER_BUFFER: Final = original_methods["register_buffer"]
_TORCH_ADD_MODULE: Final = original_methods["add_module"]


def fill(state: dict[str, Any]) -> None:
    """Enter the attributes of a module that holds nothing yet into its dict, in torch's order."""
    # Written out, as this is half of the time of ``Module()``.
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


# A member of such a name would replace the module's own state.
_RESERVED: Final = frozenset(vars(TorchModule()))


@standard
def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
    """Create the empty state; with ``call_super_init``, pass the arguments on."""
    # Torch handles arguments, and a class behind its own in the order of bases, whose ``__setattr__``
    # sees the state being set.
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
    """Restore a pickled state, also of older torch releases; reserve the ids of its hooks."""
    own = self.__dict__
    if TorchModule.__setstate__ is not _TORCH_SETSTATE:
        TorchModule.__setstate__(self, state)
        reserve_ids(own)
        return
    own.update(state)
    try:
        _ = own["_forward_pre_hooks_with_kwargs"], own["_forward_hooks_with_kwargs"]
        _ = own["_forward_hooks_always_called"], own["_non_persistent_buffers_set"]
        hooked = own["_is_full_backward_hook"] or any(map(own.__getitem__, TABLES))
    except KeyError:
        # Torch adds what states of older releases lack.
        TorchModule.__setstate__(self, {})
        hooked = True
    if hooked:
        reserve_ids(own)


def _announce(kind: str, module: torch.nn.Module, name: str, value: Any) -> Any:
    """Pass a new member to the global registration hooks; return it or its validated replacement."""
    hooks: Mapping[int, Any] = getattr(module_globals, f"_global_{kind}_registration_hooks")
    result = value
    for hook in tuple(hooks.values()):
        replacement = hook(module, name, result)
        result = result if replacement is None else replacement
    expected, accepted = _ACCEPTED[kind]
    if result is not value and not (
        isinstance(result, accepted) or (kind == "buffer" and _is_buffer_like(result))
    ):
        raise TypeError(
            f"cannot assign '{torch.typename(result)}' object to {kind} '{name}' of "
            f"{module._get_name()} ({expected} required): a registration hook returned "
            f"{reprlib.repr(result)}"
        )
    return result


# The types that registration hooks may return for each kind of member.
_ACCEPTED: Final[dict[str, tuple[str, type]]] = {
    "parameter": ("torch.nn.Parameter", Parameter),
    "buffer": ("torch.Tensor", torch.Tensor),
    "module": ("torch.nn.Module", TorchModule),
}


def _is_buffer_like(value: object) -> bool:
    return value is None or isinstance(value, torch.Tensor) or hasattr(value, "__torch_function__")


def _is_free(module: torch.nn.Module, name: object, registered: Mapping[str, Any]) -> bool:
    """Return True if ``name`` may be an entry of ``registered``, False if it cannot be a name."""
    if not isinstance(name, str) or "." in name or name == "":
        return False
    # Asked once, as in torch: a property may compute, and a ``__getattr__`` have effects.
    if hasattr(module, name) and name not in registered:
        raise KeyError(f"attribute '{name}' already exists")
    return True


# The three methods leave to torch what is patched and what torch refuses.


@standard
def register_parameter(self: torch.nn.Module, name: str, param: Parameter | None) -> None:
    """Register ``param`` as the parameter ``name``; None keeps the name free of a tensor."""
    parameters = self.__dict__.get("_parameters")
    if (
        TorchModule.register_parameter is not _TORCH_REGISTER_PARAMETER
        or parameters is None
        or not _is_free(self, name, parameters)
        or not (
            param is None or (isinstance(cast("object", param), Parameter) and not param.grad_fn)
        )
    ):
        TorchModule.register_parameter(self, name, param)
        return
    if param is not None and module_globals._global_parameter_registration_hooks:
        param = _announce("parameter", self, name, param)
    parameters[name] = param


@standard
def register_buffer(
    self: torch.nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
) -> None:
    """Register ``tensor`` as the buffer ``name``, part of the state dict if ``persistent``."""
    buffers = self.__dict__.get("_buffers")
    if (
        TorchModule.register_buffer is not _TORCH_REGISTER_BUFFER
        or buffers is None
        or not _is_free(self, name, buffers)
        or not _is_buffer_like(tensor)
    ):
        TorchModule.register_buffer(self, name, tensor, persistent)
        return
    if module_globals._global_buffer_registration_hooks:
        tensor = _announce("buffer", self, name, tensor)
    buffers[name] = tensor
    if persistent:
        self._non_persistent_buffers_set.discard(name)
    else:
        self._non_persistent_buffers_set.add(name)


@standard
def add_module(self: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Register ``module`` as the child ``name``."""
    if (
        TorchModule.add_module is not _TORCH_ADD_MODULE
        or not (module is None or isinstance(cast("object", module), TorchModule))
        or not _is_free(self, name, self._modules)
    ):
        TorchModule.add_module(self, name, module)
        return
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
    parameters, buffers = own.get("_parameters", ()), own.get("_buffers", ())
    children = own.get("_modules")
    if type(value) in _PLAIN_TYPES and not (
        name in parameters or name in buffers or name in (children or ())
    ):
        super(TorchModule, self).__setattr__(name, value)
    elif children is None:
        _TORCH_SETATTR(self, name, value)
    elif isinstance(value, Parameter):
        if (
            name in own
            or name in buffers
            or name in children
            or name in self._non_persistent_buffers_set
        ):
            others = (own, self._buffers, children)
            _replace(self, name, others, lambda: self.register_parameter(name, value))
        else:
            self.register_parameter(name, value)
    elif value is None and name in parameters:
        self.register_parameter(name, value)
    elif isinstance(value, TorchModule) and name not in parameters:
        if name in own or name in buffers or name in self._non_persistent_buffers_set:
            _replace(self, name, (own, self._buffers), lambda: _store_module(self, name, value))
        else:
            _store_module(self, name, value)
    elif value is None and name in children:
        _store_module(self, name, value)
    elif name in parameters or name in children:
        _TORCH_SETATTR(self, name, value)
    elif name in buffers or isinstance(value, Buffer):
        _set_buffer(self, name, value)
    else:
        super(TorchModule, self).__setattr__(name, value)


def _set_buffer(module: torch.nn.Module, name: str, value: Any) -> None:
    ours = type(module).register_buffer is register_buffer
    if not ours or "register_buffer" in module.__dict__ or not _is_buffer_like(value):
        _TORCH_SETATTR(module, name, value)
    elif isinstance(value, Buffer):
        module.register_buffer(name, value, bool(value.persistent))
    else:
        module.register_buffer(name, value, name not in module._non_persistent_buffers_set)


def _store_module(module: torch.nn.Module, name: str, value: torch.nn.Module | None) -> None:
    if module_globals._global_module_registration_hooks:
        value = _announce("module", module, name, value)
    module._modules[name] = value


def _replace(
    module: torch.nn.Module,
    name: str,
    mappings: tuple[dict[str, Any], ...],
    register: Callable[[], None],
) -> None:
    """Delete ``name``, register, and restore everything on failure; torch loses the old member."""
    names = module._non_persistent_buffers_set
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


@standard
def __delattr__(self: torch.nn.Module, name: str) -> None:  # noqa: N807
    """Delete a registered name or a plain attribute."""
    if "_parameters" not in self.__dict__ and TorchModule.__delattr__ is _TORCH_DELATTR:
        raise AttributeError(f"cannot delete attribute '{name}' before Module.__init__() call")
    TorchModule.__delattr__(self, name)


@patchable
def set_submodule(
    self: torch.nn.Module, target: str, module: torch.nn.Module, strict: bool = False
) -> None:
    """Put ``module`` at the path ``target``; with ``strict``, only if it replaces a module."""
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
    if hasattr(type(module), name) or name in {**module._parameters, **module._buffers}:
        return False
    return module._modules.get(name, module) is None or module.__dict__.get(name, module) is None
