"""The outcome of a function with torch or modkit, as plain data that compares bitwise."""

import collections.abc
import ctypes
import dataclasses
import hashlib
import importlib
import random
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from modkit._upstream import never_compiled
from modkit.compat.networks import define


# Up to this many elements are shown beside the digest of a tensor.
SHOWN: Final = 8
# "returns" or "raises", the frozen value or the type and text of the exception, and the warnings.
Outcome = tuple[Any, ...]
# torch and modkit deprecate TorchScript in different words; dynamo warns once for each guard.
_UNCOMPARED: Final = ("TorchScript", "torch.jit", "Guards may run slower")
_NAMESPACES: Final = {"swa": "optim.swa_utils", "hooks": "nn.modules.module"}
_ADDRESS: Final = re.compile(r"0x[0-9a-f]{6,}|(?<=object_at_)\d+")


@dataclasses.dataclass(frozen=True)
class Library:
    """torch or modkit, as users import them: ``lib.nn`` is ``torch.nn`` or ``modkit.nn``.

    Attributes:
        name: The name of the package.
    """

    name: Literal["torch", "modkit"]

    def __getattr__(self, dotted: str) -> Any:
        # Copying and pickling ask for special methods, which are not modules.
        if dotted.startswith("__"):
            raise AttributeError(dotted)
        return importlib.import_module(f"{self.name}.{_NAMESPACES.get(dotted, dotted)}")

    @property
    def nets(self) -> Any:
        """The networks of the behaviors, in their own module, so that they can be pickled."""
        name = f"nets_on_{self.name}"
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(define(self.nn, name))
        return sys.modules[name]

    def net(self) -> Any:
        """Return a new standard network, bitwise identical each time."""
        # For no device: the network is on the CPU, and others need not be initialized.
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(1)
            return self.nets.Net()


def plain(text: str) -> str:
    """Return a text without addresses, and with one name for the networks of both libraries."""
    return _ADDRESS.sub("0x", re.sub(r"nets_on_(torch|modkit)", "nets", text))


# Compiled code would evaluate the address while it is traced, and free the elements after the last
# use that it sees.
@never_compiled
def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the elements in row-major order."""
    if tensor.is_meta:
        return "meta"
    if tensor.is_nested:
        return "nested"

    is_dense = tensor.layout is torch.strided
    dense = tensor.detach() if is_dense else tensor.detach().to_dense()
    dense = dense.dequantize() if dense.is_quantized else dense
    # A clone, since a tensor of one element counts as contiguous whatever its stride is.
    flat = dense.cpu().resolve_conj().clone(memory_format=torch.contiguous_format)
    if not flat.numel():
        return "empty"
    # From memory, since NumPy need not be there.
    content = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(memoryview(content)).hexdigest()[:16]


def freeze_tensor(tensor: torch.Tensor) -> str:
    """Describe a tensor: kind, dtype, device, shape, bits, and whether it requires grad."""
    kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else "Tensor"
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return f"uninitialized {kind} {tensor.dtype}"

    words: list[object] = [kind, tensor.dtype, tensor.device, tuple(tensor.shape), _digest(tensor)]
    if tensor.requires_grad:
        words.append("requires grad")
    # The report then shows by how much two tensors differ.
    if tensor.numel() <= SHOWN and tensor.layout is torch.strided and not tensor.is_meta:
        words.append(tensor.tolist())
    return " ".join(map(str, words))


def _freeze_module(module: torch.nn.Module) -> dict[str, Any]:
    """Describe a tree: text, classes, modes, members with their gradients, and hooks."""
    modules = dict(module.named_modules(remove_duplicate=False))
    parameters = module.named_parameters(remove_duplicate=False)
    tensors: dict[str, torch.Tensor] = {**dict(parameters), **dict(module.named_buffers())}

    hooks = {
        name: [len(table) for key, table in vars(child).items() if "_hooks" in key and table]
        for name, child in modules.items()
    }
    # Other tensors warn when they are asked for a gradient.
    gradients = {name: tensor.grad for name, tensor in tensors.items() if tensor.is_leaf}

    return {
        "text": plain(repr(module)),
        "modules": {
            name: (type(child).__name__, child.training) for name, child in modules.items()
        },
        "tensors": freeze(tensors),
        "gradients": {name: freeze(grad) for name, grad in gradients.items() if grad is not None},
        "state": list(module.state_dict()),
        "hooks": {name: sizes for name, sizes in hooks.items() if sizes},
    }


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of an instance of a dataclass, and None for other values."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return None
    # A field without a default may have no value.
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def freeze(value: Any) -> Any:
    """Turn a value into plain data that compares bitwise."""
    if isinstance(value, torch.Tensor):
        return freeze_tensor(value)
    if isinstance(value, torch.nn.Module):
        return _freeze_module(value)

    if isinstance(value, collections.abc.Mapping):
        return {f"{freeze(key)}": freeze(entry) for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(freeze, value)))
    if isinstance(value, collections.abc.Iterator):
        return [freeze(item) for item in value]
    if isinstance(value, (list, tuple)):
        frozen = [freeze(item) for item in value]
        return frozen if type(value) in {list, tuple} else (type(value).__name__, frozen)

    if (fields := _fields(value)) is not None:
        return type(value).__name__, freeze(fields)

    # By name: classes and functions of modkit take the place of those of torch.
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return value.__qualname__
    # The default shows an address.
    shows: object = type(value).__repr__
    if shows is object.__repr__:
        return f"a {type(value).__qualname__}"
    return value if isinstance(value, (bool, int, str, type(None))) else plain(repr(value))


def leaves(value: Any) -> list[Any]:
    """Return the values in nested mappings, lists, tuples and dataclasses."""
    if isinstance(value, collections.abc.Mapping):
        value = list(value.values())
    elif fields := _fields(value):
        value = list(fields.values())
    if not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def seed(number: int = 0) -> None:
    """Seed the generators of Python, torch and NumPy, the last only if it has been imported."""
    random.seed(number)
    torch.manual_seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)


def outcome(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call a function and return its frozen value or exception, and then its warnings.

    The random state is that of a fixed seed. Notes that modkit adds to exceptions are not compared.
    """
    # The generator itself: ``torch.manual_seed`` also seeds every accelerator, which takes longer.
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Outcome = ("returns", freeze(function(*arguments)))
        except Exception as error:  # noqa: BLE001 - the exception is the outcome
            result = ("raises", type(error).__name__, plain(str(error)))

    warned = [plain(str(warning.message)) for warning in caught]
    compared = [message for message in warned if not any(word in message for word in _UNCOMPARED)]
    return *result, compared


def difference(left: Any, right: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place at which two frozen values differ, and both values."""
    if type(left) is type(right) and isinstance(left, (dict, list, tuple)):
        if isinstance(left, dict) and list(left) != list(right):
            return difference(list(left), list(right), f"{path} keys")

        for key in left if isinstance(left, dict) else range(min(len(left), len(right))):
            place = difference(left[key], right[key], f"{path}/{key}")
            if place is not None:
                return place
    return None if left == right else (path, left, right)
