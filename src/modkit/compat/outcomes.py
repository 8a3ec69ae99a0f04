"""The outcome of a function with torch or modkit, as plain data that compares bitwise."""

import collections.abc
import ctypes
import hashlib
import importlib
import re
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from modkit.compat.networks import define


SHOWN: Final = 8  # elements beside the digest of a tensor
Outcome = tuple[Any, ...]
# torch and modkit deprecate TorchScript in different words; dynamo warns once for each guard.
_UNCOMPARED: Final = ("TorchScript", "torch.jit", "Guards may run slower")
_NAMESPACES: Final = {"swa": "optim.swa_utils", "hooks": "nn.modules.module"}
_ADDRESS: Final = re.compile(r"0x[0-9a-f]{6,}|(?<=object_at_)\d+")


@dataclass(frozen=True)
class Library:
    """torch or modkit, as users import them: ``lib.nn`` is ``torch.nn`` or ``modkit.nn``."""

    name: Literal["torch", "modkit"]

    def __getattr__(self, dotted: str) -> Any:
        if dotted.startswith("__"):
            raise AttributeError(dotted)
        return importlib.import_module(f"{self.name}.{_NAMESPACES.get(dotted, dotted)}")

    @property
    def nets(self) -> Any:
        """The networks of the behaviours, in their own module, so that they can be pickled."""
        name = f"nets_on_{self.name}"
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(define(self.nn, name))
        return sys.modules[name]

    def net(self) -> Any:
        """Return a new standard network, bitwise identical each time."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(1)
            return self.nets.Net()


def plain(text: str) -> str:
    """Return a text without addresses, and with one name for the networks of both libraries."""
    return _ADDRESS.sub("0x", re.sub(r"nets_on_(torch|modkit)", "nets", text))


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the elements in row-major order."""
    if tensor.is_meta or tensor.is_nested:
        return "meta" if tensor.is_meta else "nested"
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    dense = dense.dequantize() if dense.is_quantized else dense
    # A clone, since a tensor of one element counts as contiguous whatever its stride is.
    flat = dense.cpu().resolve_conj().clone(memory_format=torch.contiguous_format)
    if not flat.numel():
        return "empty"
    content = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(memoryview(content)).hexdigest()[:16]


def _freeze_tensor(tensor: torch.Tensor) -> str:
    kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else "Tensor"
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return f"uninitialized {kind} {tensor.dtype}"
    small = tensor.numel() <= SHOWN and not (tensor.is_meta or tensor.is_sparse)
    return (
        f"{kind} {tensor.dtype} {tensor.device} {tuple(tensor.shape)} {_digest(tensor)}"
        f"{' requires grad' * tensor.requires_grad}{f' {tensor.tolist()}' if small else ''}"
    )


def _freeze_module(module: torch.nn.Module) -> dict[str, Any]:
    modules = dict(module.named_modules(remove_duplicate=False))
    parameters = module.named_parameters(remove_duplicate=False)
    tensors: dict[str, torch.Tensor] = {**dict(parameters), **dict(module.named_buffers())}
    hooks = {
        name: [len(value) for key, value in vars(one).items() if "_hooks" in key and value]
        for name, one in modules.items()
    }
    gradients = {name: each.grad for name, each in tensors.items() if each.is_leaf}
    return {
        "text": plain(repr(module)),
        "modules": {name: (type(one).__name__, one.training) for name, one in modules.items()},
        "tensors": freeze(tensors),
        "gradients": {name: freeze(each) for name, each in gradients.items() if each is not None},
        "state": list(module.state_dict()),
        "hooks": {name: sizes for name, sizes in hooks.items() if sizes},
    }


def freeze(value: Any) -> Any:
    """Turn a value into plain data that compares bitwise."""
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value)
    if isinstance(value, torch.nn.Module):
        return _freeze_module(value)
    if isinstance(value, collections.abc.Mapping):
        return {f"{freeze(key)}": freeze(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(freeze, value)))
    if isinstance(value, collections.abc.Iterator):
        return [freeze(each) for each in value]
    if isinstance(value, (list, tuple)):
        frozen = [freeze(each) for each in value]
        return frozen if type(value) in {list, tuple} else (type(value).__name__, frozen)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return value.__qualname__
    shows: object = type(value).__repr__
    if shows is object.__repr__:
        return f"a {type(value).__qualname__}"
    return value if isinstance(value, (bool, int, str, type(None))) else plain(repr(value))


def leaves(value: Any) -> list[Any]:
    """Return the values in nested mappings, lists and tuples."""
    if isinstance(value, collections.abc.Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for each in value for leaf in leaves(each)]


def outcome(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call a function and return its frozen value or exception, and then its warnings."""
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: Outcome = ("returns", freeze(function(*arguments)))
        except Exception as error:  # noqa: BLE001 - the exception is the outcome
            found = ("raises", type(error).__name__, plain(str(error)))
    texts = (plain(str(one.message)) for one in caught)
    return *found, [text for text in texts if not any(part in text for part in _UNCOMPARED)]


def difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place at which two frozen values differ, and both values."""
    if type(one) is type(other) and isinstance(one, (dict, list, tuple)):
        if isinstance(one, dict) and list(one) != list(other):
            return difference(list(one), list(other), f"{path} keys")
        for key in one if isinstance(one, dict) else range(min(len(one), len(other))):
            if (found := difference(one[key], other[key], f"{path}/{key}")) is not None:
                return found
    return None if one == other else (path, one, other)
