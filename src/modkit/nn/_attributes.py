"""The methods that register a parameter or a child of a module."""

import reprlib
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch.nn import Parameter

from modkit._upstream import module_globals, original_methods
from modkit.nn._overrides import TorchModule, of_torch, standard


# A global is read in half the time of an entry of a dict.
_TORCH_REGISTER_PARAMETER: Final = original_methods["register_parameter"]
_TORCH_ADD_MODULE: Final = original_methods["add_module"]


def _announce(kind: str, module: torch.nn.Module, name: str, value: Any) -> Any:
    """Pass a new member to the global registration hooks; return it or its replacement."""
    # A replacement is checked like what was to be registered. Torch stores it unseen, and the
    # error comes up in a place that has nothing to do with the hook.
    hooks: Mapping[int, Any] = getattr(module_globals, f"_global_{kind}_registration_hooks")
    result = value
    # A copy of the table, so that a hook may remove itself.
    for hook in tuple(hooks.values()):
        replacement = hook(module, name, result)
        result = result if replacement is None else replacement

    expected, accepted = _ACCEPTED[kind]
    if result is not value and not isinstance(result, accepted):
        raise TypeError(
            f"cannot assign '{torch.typename(result)}' object to {kind} '{name}' of "
            f"{module._get_name()} ({expected} required): a registration hook returned "
            f"{reprlib.repr(result)}"
        )
    return result


# The types that registration hooks may return for each kind of member.
_ACCEPTED: Final[dict[str, tuple[str, type]]] = {
    "parameter": ("torch.nn.Parameter", Parameter),
    "module": ("torch.nn.Module", TorchModule),
}


def _is_free(module: torch.nn.Module, name: object, registered: Mapping[str, Any]) -> bool:
    """Return True if ``name`` may be an entry of ``registered``, False if it cannot be a name."""
    # A member with the name of a method would take the place of what makes the module work.
    if not isinstance(name, str) or "." in name or name == "":
        return False
    # Asked once, as in torch: a property may compute, and a ``__getattr__`` have effects.
    if hasattr(module, name) and name not in registered:
        raise KeyError(f"attribute '{name}' already exists")
    return True


# Both methods leave to torch what is patched and what torch refuses, so its errors are torch's own.


@standard
def register_parameter(self: torch.nn.Module, name: str, param: Parameter | None) -> None:
    """Register ``param`` as the parameter ``name``; None keeps the name free of a tensor.

    Args:
        self: The module.
        name: Name of the parameter, without a dot, and of no other attribute.
        param: A leaf of the autograd graph. None is not saved and not converted.

    Raises:
        AttributeError: If the class has not called ``super().__init__()``.
        TypeError: If ``param`` is not a parameter, ``name`` is not a string, or a registration hook
            has returned something else than a parameter.
        KeyError: If ``name`` is empty, has a dot, or is an attribute that is not a parameter.
        ValueError: If ``param`` was computed, so it is not a leaf of the autograd graph.

    modkit: If a global registration hook returns anything but a Parameter or None, a TypeError
    names the class, the parameter and the value. A hook may remove itself while it runs.
    """
    parameters = self.__dict__.get("_parameters")
    if (
        TorchModule.register_parameter is not _TORCH_REGISTER_PARAMETER
        or parameters is None
        or not (
            param is None or (isinstance(cast("object", param), Parameter) and not param.grad_fn)
        )
        or not _is_free(self, name, parameters)
    ):
        # A patch may return something.
        return cast("None", of_torch(self, "register_parameter")(name, param))

    if param is not None and module_globals._global_parameter_registration_hooks:
        param = _announce("parameter", self, name, param)
    parameters[name] = param
    return None


@standard
def add_module(self: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Register ``module`` as the child ``name``.

    Args:
        self: The module.
        name: Name of the child, without a dot, and of no other attribute.
        module: Any ``torch.nn.Module``. None keeps the name free of a module.

    Raises:
        TypeError: If ``module`` is neither a module nor None, ``name`` is not a string, or a
            registration hook has returned something else than a module.
        KeyError: If ``name`` is empty, has a dot, or is an attribute that is not a child.

    modkit: If a global registration hook returns anything but a module or None, a TypeError names
    the class, the child and the value. A hook may remove itself while it runs.
    """
    if (
        TorchModule.add_module is not _TORCH_ADD_MODULE
        or not (module is None or isinstance(cast("object", module), TorchModule))
        or not _is_free(self, name, self._modules)
    ):
        return cast("None", of_torch(self, "add_module")(name, module))

    if module_globals._global_module_registration_hooks:
        module = _announce("module", self, name, module)
    self._modules[name] = module
    return None
