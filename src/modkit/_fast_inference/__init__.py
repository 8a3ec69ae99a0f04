"""Eager inference with less Python around each operation: ``fast_inference``."""

import sys
from collections.abc import Callable, Generator
from contextlib import _GeneratorContextManager
from typing import Final, TypeVar, cast

from torch import nn

from modkit._fast_inference.layers import has_own_forward, is_container, kind_of
from modkit._fast_inference.members import CALL_SLOT, Binding
from modkit._fast_inference.runs import Step, container_function, function_of, user_function
from modkit._interrupts import uninterrupted
from modkit._namespace import publish
from modkit._tree import descend


ModuleT = TypeVar("ModuleT", bound=nn.Module)

# The modules that are in a block of any thread, by identity. Blocks of one module share its
# binding, so the last one that is left restores its ``__dict__``.
_bindings: Final[dict[int, Binding]] = {}


class _Block(_GeneratorContextManager[ModuleT]):
    def __repr__(self) -> str:
        return "<modkit.fast_inference(model): a block, for a with statement>"


def fast_inference(model: ModuleT) -> _Block[ModuleT]:
    """Run a model in eager mode with less Python overhead.

    Use it for small networks at small batch sizes: policies, tree search, controllers,
    token-by-token decoding. Large networks gain a few percent. Layers run without
    ``Module._call_impl`` and ``__getattr__``, containers of layers in one function, and users'
    modules call ``forward`` directly. Results are bitwise identical. Hooks, patches, overrides, new
    weights, modes and other changes made inside take effect at once.

    Args:
        model: Any ``torch.nn.Module``. Compiled and scripted modules in it are left alone.

    Returns:
        A context manager whose value is the model.

    Raises:
        TypeError: If ``model`` is not a module, on entering the block.

    Example:
        >>> import torch, modkit, modkit.nn as nn
        >>> policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).eval()
        >>> with torch.inference_mode(), modkit.fast_inference(policy):
        ...     for _ in range(3):
        ...         action = policy(torch.ones(1, 4)).argmax()

    Limitations: inside the block, do not write to or copy the ``__dict__`` of a module, change the
    members of a shallow copy made there, or write to a table such as ``_modules`` that was read
    before. A ``Module.__getattr__`` patched inside is not called for members.
    ``_compiled_call_impl``, by which libraries find compiled modules, is set on modules that are
    not compiled.
    """
    return _Block(_block, (model,), {})


def _block(model: ModuleT) -> Generator[ModuleT, None, None]:
    if not isinstance(cast("object", model), nn.Module):
        raise TypeError(
            f"fast_inference(): model must be a torch.nn.Module, got {type(model).__name__}"
        )

    modules = _tree(model)
    used: list[Binding] = []
    # If the interpreter exits in the block, the globals of this file may be gone.
    leave = _leave
    try:
        try:
            # Handlers of signals run when this has ended. No lock while the block runs: other
            # threads may enter and leave blocks of the same modules.
            with uninterrupted():
                _enter(modules, used)
            yield model
        finally:
            leave(used)
    finally:
        # This completes what a signal has interrupted, and otherwise has no effect.
        leave(used)


def _enter(modules: list[nn.Module], used: list[Binding]) -> None:
    """Bind the modules that no other block has bound; note the bindings of all in ``used``."""
    fresh: list[Binding] = []
    for module in modules:
        binding = _bindings.get(id(module))
        if binding is None:
            binding = _bindings[id(module)] = Binding(module)
            fresh.append(binding)
        binding.users += 1
        used.append(binding)

    # All tables are replaced before the first function is made: functions of containers read the
    # tables of the layers below.
    for binding in fresh:
        binding.open()
    _bind(fresh)


def _tree(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules below it, except compiled and scripted ones."""
    modules: dict[int, nn.Module] = {}

    def enter(_: str, module: nn.Module, __: object) -> bool | None:
        table = module.__dict__.get("_modules")
        # The slot of a compiled module is taken, and not by a block. What ``torch.compile`` returns
        # has the module below it, whose code is compiled for the ``__dict__`` that it has outside.
        taken = CALL_SLOT in module.__dict__ and id(module) not in _bindings
        if id(module) in modules or taken or not isinstance(table, dict) or "_orig_mod" in table:
            return None
        modules[id(module)] = module
        return True

    if enter("", model, None):
        descend(model, True, enter)
    return list(modules.values())


def _bind(bindings: list[Binding]) -> None:
    """Give modules their functions, except those that only runs of containers call."""
    containers = {id(b.module) for b in bindings if is_container(type(b.module))}
    children = [(id(b.module), id(child)) for b in bindings for child in _children(b.module)]
    # Only containers have these as children, so only they call them.
    inner = {child for holder, child in children if holder in containers}
    inner -= {child for holder, child in children if holder not in containers}

    # A run needs the functions of its layers: layers first, then the containers around them.
    outer_bindings = [b for b in reversed(bindings) if id(b.module) not in inner]
    outer_bindings.sort(key=lambda b: id(b.module) in containers)
    # Those within come last, when it is known which of them the runs cover. Of these, a container
    # comes before its layers, which it covers in turn.
    inner_bindings = [b for b in bindings if id(b.module) in inner]

    covered = set[int]()
    for binding in (*outer_bindings, *inner_bindings):
        module = binding.module
        key = id(module)
        kind = kind_of(type(module))
        if key in inner and key in covered:
            continue

        if key in containers:
            binding.bind(container_function(module, covered))
        elif kind is not None:
            binding.bind(function_of([Step(module, kind)]))
        elif has_own_forward(type(module)):
            binding.bind(user_function(module))


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def _leave(used: list[Binding], is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """End the use of bindings, each of which is then dropped from the list."""
    if is_finalizing():
        return
    with uninterrupted():
        while used:
            binding = used.pop()
            binding.users -= 1
            if not binding.users:
                del _bindings[id(binding.module)]
                binding.close()


publish("modkit", fast_inference)
