"""Everything observable of a module tree, as plain data that compares bitwise."""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tests.helpers import freeze


HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
FLAG_TABLES = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
UNCOMPARED = {"_parameters", "_buffers", "_modules", *HOOK_TABLES, *FLAG_TABLES}


class Ordinals:
    """Numbers objects in the order of first sight, so that sharing is compared."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []

    def of(self, value: object) -> int:
        """Return the number of the object."""
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
        return self._seen[id(value)]


def positions(root: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.nn.Module]]:
    """List every place of the tree, shared modules once per place, reading the tables only."""
    found = [((), root)]
    for name, child in root._modules.items():
        # A deep copy of a module that forwards `__deepcopy__` to a parameter is a parameter.
        if isinstance(child, torch.nn.Module):
            found += [((name, *path), module) for path, module in positions(child)]
    return found


def distinct_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """List every module of the tree once, parents first."""
    return list({id(module): module for _, module in positions(root)}.values())


def observe(root: torch.nn.Module) -> list[Any]:
    """Describe every place of the tree: members, identities, gradients, hooks, attributes."""
    ordinals = Ordinals()
    return [
        text_of(root),
        *((path, describe(module, ordinals)) for path, module in positions(root)),
    ]


def text_of(module: torch.nn.Module) -> str:
    """Return the repr, or the error of a layer that lacks what its repr needs."""
    try:
        return repr(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def describe(module: torch.nn.Module, ordinals: Ordinals) -> dict[str, Any]:
    """Describe one module without its children."""
    return {
        "class": type(module).__name__,
        "is": ordinals.of(module),
        "parameters": [
            (name, describe_tensor(value, ordinals)) for name, value in module._parameters.items()
        ],
        "buffers": [
            (name, describe_tensor(value, ordinals)) for name, value in module._buffers.items()
        ],
        "children": [
            (name, None if child is None else ordinals.of(child))
            for name, child in module._modules.items()
        ],
        "tables": [
            type(getattr(module, f"_{name}")) for name in ("parameters", "buffers", "modules")
        ],
        "hooks": [describe_hooks(getattr(module, name)) for name in HOOK_TABLES],
        "flags": [describe_flags(module, name) for name in FLAG_TABLES],
        "attributes": [
            (name, describe_attribute(value, ordinals))
            for name, value in module.__dict__.items()
            if name not in UNCOMPARED
        ],
    }


def describe_attribute(value: Any, ordinals: Ordinals) -> Any:
    """Describe a plain attribute; modules compare by their place in the tree."""
    # A lazy layer that is traced keeps one. Reading an attribute of it adds to the graph, and so to
    # its name.
    if isinstance(value, torch.fx.Proxy):
        return "a proxy"
    if isinstance(value, torch.nn.Module):
        return ordinals.of(value)
    if isinstance(value, list) and any(isinstance(item, torch.nn.Module) for item in value):
        return [describe_attribute(item, ordinals) for item in value]
    if isinstance(value, torch.Tensor) and is_lazy(value):
        return type(value).__name__
    origin = getattr(value, "__origin__", None)
    return freeze(value if origin is None else origin)


def describe_tensor(value: Any, ordinals: Ordinals) -> Any:
    """Describe a member: its identity, bits, gradient and place in the autograd graph."""
    if not isinstance(value, torch.Tensor):
        return freeze(value)
    if is_lazy(value):
        return ordinals.of(value), type(value).__name__, value.dtype, value.requires_grad
    return (
        ordinals.of(value),
        freeze(value),
        value.stride(),
        value.is_leaf,
        freeze(value.grad) if value.is_leaf else None,
    )


def describe_hooks(table: Any) -> tuple[str, list[int | str]]:
    """Describe a hook table by the ordinals of its hooks, those of torch by their class."""
    if not table:
        return type(table).__name__, []
    hooks = [getattr(hook, "hook", hook) for hook in table.values()]
    return type(table).__name__, [getattr(hook, "ordinal", type(hook).__name__) for hook in hooks]


def describe_flags(module: torch.nn.Module, name: str) -> list[int]:
    """Return the positions of the hook table for which a flag is set."""
    if not getattr(module, name):
        return []
    table = "_forward_pre_hooks" if "pre" in name else "_forward_hooks"
    return [
        position
        for position, key in enumerate(getattr(module, table))
        if key in getattr(module, name)
    ]


class Glances:
    """A quick snapshot of a tree; the values of a tensor are read again if its version changed."""

    def __init__(self) -> None:
        # With its storage, so that no later one gets the same address.
        self._tensors: dict[int, tuple[torch.Tensor, Any, Any, Any]] = {}

    def of(self, root: torch.nn.Module) -> list[Any]:
        """Describe structure and values: names, identities, hooks and attributes by number."""
        ordinals = Ordinals()
        return [self._describe(module, ordinals) for module in distinct_modules(root)]

    def _describe(self, module: torch.nn.Module, ordinals: Ordinals) -> Any:
        state = module.__dict__
        tensors = (*module._parameters.items(), *module._buffers.items())
        return (
            type(module).__name__,
            ordinals.of(module),
            [(name, self._tensor(value), ordinals.of(value)) for name, value in tensors],
            [
                (name, None if child is None else ordinals.of(child))
                for name, child in module._modules.items()
            ],
            [len(state[table]) for table in HOOK_TABLES if table in state],
            state.get("training"),
            len(state),
        )

    def _tensor(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_inference():
            return type(tensor).__name__
        key = tensor._version, tensor.data_ptr() if not tensor.is_meta else 0, tensor.dtype
        known = self._tensors.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != key:
            storage = None if tensor.is_meta else tensor.untyped_storage()
            known = self._tensors[id(tensor)] = (tensor, key, freeze(tensor), storage)
        return known[2], tensor.requires_grad, tensor.grad is None
