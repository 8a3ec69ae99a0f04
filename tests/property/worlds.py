"""Global state of one side of a lockstep: hook tables for all modules, and patches."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.nn.modules.module as torch_module
from torch.utils.hooks import RemovableHandle as HookIds

from tests.property.mixed_nodes import Lora, Plain
from tests.property.node_tools import LOG, summary


TABLES: Final = {
    name: table
    for name, table in vars(torch_module).items()
    if name.startswith("_global_") and isinstance(table, dict)
}
# The functions of `torch.nn.Module`, any of which a library may replace.
METHODS: Final = tuple(
    name
    for name, value in vars(torch.nn.Module).items()
    if isinstance(inspect.unwrap(value) if callable(value) else value, types.FunctionType)
)
SIGNATURES: Final = {name: inspect.signature(vars(torch.nn.Module)[name]) for name in METHODS}


# Classes that can be patched, beside those of `torch.nn` and of the trees.
OTHERS: Final = {"TorchModule": torch.nn.Module, "Lora": Lora, "Plain": Plain}


class World:
    """The global hook tables and the patches of one side, active while it runs an operation."""

    def __init__(self) -> None:
        self.patches: list[str] = []
        self._hooks: dict[str, list[tuple[int, Any]]] = {}
        # Tables that an operation has substituted for torch's.
        self._tables: dict[str, Any] = {}
        self._full: bool | None = None
        # Hooks are told apart by a number that the process counts.
        self._next_hook_id = 0

    @contextmanager
    def entered(self, side: Any) -> Iterator[None]:
        """Install the tables and patches, and remove them on exit."""
        next_hook_id = HookIds.next_id
        HookIds.next_id = self._next_hook_id
        torch_module._global_is_full_backward_hook = self._full
        for name, hooks in self._hooks.items():
            TABLES[name].update(hooks)
        for name, table in self._tables.items():
            setattr(torch_module, name, table)
        try:
            with ExitStack() as stack:
                for dotted in self.patches:
                    stack.enter_context(patched(side, dotted))
                yield
        finally:
            self._next_hook_id = HookIds.next_id
            HookIds.next_id = next_hook_id
            self._full = torch_module._global_is_full_backward_hook
            torch_module._global_is_full_backward_hook = None
            self._hooks, self._tables = {}, {}
            for name, original in TABLES.items():
                table = getattr(torch_module, name)
                if table is not original:
                    self._tables[name] = table
                    setattr(torch_module, name, original)
                if original:
                    self._hooks[name] = list(original.items())
                    original.clear()


def home_of(side: Any, name: str) -> Any:
    """Return the owner of the function: `torch.nn.functional`, a layer's class or a user's."""
    from tests.property import nodes_modkit, nodes_torch

    if name == "F":
        return torch.nn.functional
    if name in OTHERS:
        return OTHERS[name]
    nodes = {"torch": nodes_torch, "modkit": nodes_modkit}[side.impl.name]
    return getattr(nodes, name, None) or getattr(torch.nn, name)


@contextmanager
def patched(side: Any, dotted: str) -> Iterator[None]:
    """Replace a function by one that logs its calls."""
    home_name, _, name = dotted.partition(".")
    home = home_of(side, home_name)
    static = inspect.getattr_static(home, name)
    own = name in vars(home)
    if home_name == "TorchModule":
        replacement = noting_arguments(name, static)
    else:
        replacement = noting_calls(dotted, getattr(home, name))
    setattr(home, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(home, name, static)
        else:
            delattr(home, name)


def noting_calls(dotted: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that logs its calls and doubles the result."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        LOG.append(("patched", dotted, len(args), sorted(kwargs)))
        output = original(*args, **kwargs)
        return output * 2 if isinstance(output, torch.Tensor) else output

    return noting


def noting_arguments(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that logs its arguments, positional or keyword."""
    bind = SIGNATURES[name].bind

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        bound = bind(*args, **kwargs)
        bound.apply_defaults()
        owner, *others = bound.arguments.values()
        LOG.append((name, type(owner).__name__, [summary(value) for value in others]))
        return original(*args, **kwargs)

    return noting
