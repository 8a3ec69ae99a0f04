"""Compare two implementations by their outcomes, frozen to plain data."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import importlib
import random
import sys
import types
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.modules.module as torch_module

from modkit.compat.outcomes import freeze_tensor


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Implementation:
    """One of the two libraries under test; attribute access finds names where users import them.

    ``impl.nn`` is ``torch.nn`` or ``modkit.nn``; ``impl.swa_utils`` likewise; any other name is
    looked up in ``nn``, then in ``nn.modules.module``, then in ``swa_utils``.
    """

    name: Literal["torch", "modkit"]

    @property
    def nn(self) -> ModuleType:
        """The ``nn`` namespace."""
        return importlib.import_module(f"{self.name}.nn")

    @property
    def own(self) -> ModuleType:
        """The ``nn`` namespace, with each layer as a user's class that has ``nn.Module`` as a base.

        Layers are torch's own in both libraries. A class ``class Linear(torch.nn.Linear, Module)``
        has torch's ``forward`` and, as a module, the behaviour of the implementation.
        """
        return _OWN[self.name]

    @property
    def swa_utils(self) -> ModuleType:
        """The ``optim.swa_utils`` namespace."""
        return importlib.import_module(f"{self.name}.optim.swa_utils")

    @property
    def jit(self) -> ModuleType:
        """The ``jit`` namespace."""
        return importlib.import_module(f"{self.name}.jit")

    def submodule(self, dotted: str) -> ModuleType:
        """Import ``<implementation>.<dotted>``, for example ``nn.utils.parametrize``."""
        return importlib.import_module(f"{self.name}.{dotted}")

    def __getattr__(self, attribute: str) -> Any:
        # The namespaces come here only if importing them has raised AttributeError.
        if attribute.startswith("__") or attribute in {"nn", "own", "swa_utils", "jit"}:
            raise AttributeError(attribute)
        if hasattr(self.nn, attribute):
            return getattr(self.nn, attribute)
        hooks = self.submodule("nn.modules.module")
        if hasattr(hooks, attribute):
            return getattr(hooks, attribute)
        return getattr(self.swa_utils, attribute)

    def __str__(self) -> str:
        return self.name


GLOBAL_TABLES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)

TORCH = Implementation("torch")
MODKIT = Implementation("modkit")


class _Own(ModuleType):
    """A module, so that instances of its classes can be pickled."""

    def __init__(self, impl: Implementation) -> None:
        super().__init__(f"{__name__}_{impl}")
        self.__all__ = ()
        self._impl = impl

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._impl.nn, name)
        if not (isinstance(value, type) and issubclass(value, torch.nn.Module)):
            return value
        return value if value is self._impl.nn.Module else self.derive(value)

    def derive(self, layer: type[torch.nn.Module]) -> type[torch.nn.Module]:
        """Return the class that has a layer of torch, and the implementation's Module, as bases."""
        name = layer.__name__
        if name not in vars(self):
            derived = types.new_class(name, (layer, self._impl.nn.Module))
            derived.__module__ = self.__name__
            setattr(self, name, derived)
        found: type[torch.nn.Module] = getattr(self, name)
        return found


_OWN: dict[str, ModuleType] = {str(impl): _Own(impl) for impl in (TORCH, MODKIT)}
sys.modules.update({module.__name__: module for module in _OWN.values()})


def seed_everything(seed: int = 0) -> None:
    """Reset the random state of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    # The generator itself: `torch.manual_seed` seeds every accelerator too, which takes longer than
    # most of the tests.
    torch.default_generator.manual_seed(seed)


_PLAIN = {str, int, bool, float, type(None)}


def freeze(value: Any) -> Any:
    """Turn a value into plain data that compares bitwise.

    Tensors are described as in ``modkit compat``: kind, dtype, device, shape, a digest of their
    bits, requires_grad. Modules become their repr and their frozen state. Unlike there, containers
    and numbers keep their types.
    """
    if type(value) in _PLAIN:
        return (type(value).__name__, repr(value))
    if torch.nn.parameter.is_lazy(value):
        return (type(value).__name__, "uninitialized")
    if isinstance(value, torch.Tensor):
        return freeze_tensor(value)
    if isinstance(value, torch.fx.Proxy):
        return ("Proxy", repr(value))
    if isinstance(value, torch.nn.Module):
        return ("Module", type(value).__name__, repr(value), freeze(dict(value.state_dict())))
    if isinstance(value, collections.abc.Mapping):
        return (type(value).__name__, [(freeze(k), freeze(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [freeze(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(repr(freeze(item)) for item in value))
    if isinstance(value, type):
        return ("type", value.__qualname__)
    if callable(value) and hasattr(value, "__qualname__"):
        return ("callable", value.__qualname__)
    shows: object = type(value).__repr__
    if shows is object.__repr__:
        return ("object", type(value).__qualname__)
    return (type(value).__name__, repr(value))


def outcome(scenario: Callable[[Implementation], Any], impl: Implementation) -> tuple[Any, ...]:
    """Run the scenario; return its value, or the exception's type and text."""
    seed_everything()
    try:
        value = scenario(impl)
    except Exception as error:
        return ("raised", type(error).__name__, str(error))
    return ("returned", freeze(value))


def same(scenario: Callable[[Implementation], Any]) -> tuple[Any, ...]:
    """Assert that torch and modkit give the same outcome, and return it."""
    expected = outcome(scenario, TORCH)
    actual = outcome(scenario, MODKIT)
    assert expected == actual
    return expected


@contextlib.contextmanager
def clean_global_hooks() -> Iterator[None]:
    """Clear torch's global hook tables and the kind of backward hooks on exit.

    Torch's `remove()` keeps the kind, so removing the handles would leak it.
    """
    for name in GLOBAL_TABLES:
        assert not getattr(torch_module, name), f"{name} was not empty on entry"
    try:
        yield
    finally:
        for name in GLOBAL_TABLES:
            getattr(torch_module, name).clear()
        torch_module._global_is_full_backward_hook = None
