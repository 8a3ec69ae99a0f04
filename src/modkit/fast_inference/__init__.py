"""Eager inference with less Python around each operation: ``fast_inference``."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, TypeVar, cast

from torch import nn

from modkit._tree import descend
from modkit.fast_inference.folding import folds_of
from modkit.fast_inference.layers import has_own_forward, is_container, kind_of
from modkit.fast_inference.members import CALL_SLOT, Binding
from modkit.fast_inference.runs import Call, Step, container_function, function_of, user_function


ModuleT = TypeVar("ModuleT", bound=nn.Module)

_bindings: Final[dict[int, Binding]] = {}
_lock: Final = threading.RLock()


@contextmanager
def fast_inference(
    model: ModuleT, *, fold_batch_norm: bool = False
) -> Generator[ModuleT, None, None]:
    """Run a model in eager mode with less Python overhead.

    Use it for small networks at small batch sizes: policies, tree search, controllers,
    token-by-token decoding. Large networks gain a few percent. Layers run without
    ``Module._call_impl`` and ``__getattr__``, containers of layers in one function, and users'
    modules call ``forward`` directly. Results are bitwise identical. Hooks, patches, overrides, new
    weights, modes and other changes made inside take effect at once.

    Args:
        model: Any ``torch.nn.Module``. Compiled and scripted modules in it are left alone.
        fold_batch_norm: Also fold each BatchNorm in evaluation mode into the convolution before it,
            where gradients are disabled, with outputs equal up to rounding. Nested blocks need the
            same value.

    Yields:
        The model.

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
    if not isinstance(cast("object", model), nn.Module):
        raise TypeError(
            f"fast_inference(): model must be a torch.nn.Module, got {type(model).__name__}"
        )
    modules = _tree(model)
    folds = folds_of(model, modules) if fold_batch_norm else {}
    with _lock:
        used = _enter(modules, folds)
    try:
        yield model
    finally:
        with _lock:
            _leave(used)


def _enter(modules: list[nn.Module], folds: dict[int, Call]) -> list[Binding]:
    for module in modules:
        binding = _bindings.get(id(module))
        if binding is not None and (binding.fold is None) != (id(module) not in folds):
            raise RuntimeError(
                f"fast_inference(): {type(module).__name__} is in a block with another value of "
                "fold_batch_norm. Give both blocks the same value, or leave the first one."
            )
    used: list[Binding] = []
    fresh: list[Binding] = []
    try:
        for module in modules:
            binding = _bindings.get(id(module))
            if binding is None:
                binding = _bindings[id(module)] = Binding(module, folds.get(id(module)))
                fresh.append(binding)
            binding.users += 1
            used.append(binding)
        for binding in fresh:
            binding.open()
        _bind(fresh)
    except BaseException:
        _leave(used)
        raise
    return used


def _tree(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules below it, except compiled and scripted ones."""
    found: dict[int, nn.Module] = {}

    def enter(_: str, module: nn.Module, __: object) -> bool | None:
        table = module.__dict__.get("_modules")
        compiled = CALL_SLOT in module.__dict__ and id(module) not in _bindings
        if id(module) in found or compiled or not isinstance(table, dict):
            return None
        found[id(module)] = module
        return True

    if enter("", model, None):
        descend(model, True, enter)
    return list(found.values())


def _bind(bindings: list[Binding]) -> None:
    """Give modules their functions, except those that only runs of containers call."""
    containers = {id(one.module) for one in bindings if is_container(type(one.module))}
    children = [(id(one.module), id(child)) for one in bindings for child in _children(one.module)]
    inner = {child for holder, child in children if holder in containers}
    inner -= {child for holder, child in children if holder not in containers}
    # A run needs the functions of its layers: layers first, then the containers around them.
    ordered = [one for one in reversed(bindings) if id(one.module) not in inner]
    ordered.sort(key=lambda one: id(one.module) in containers)
    within = [one for one in bindings if id(one.module) in inner]
    within.sort(key=lambda one: id(one.module) not in containers)
    covered = set[int]()
    for one in (*ordered, *within):
        number, kind = id(one.module), kind_of(type(one.module))
        if number in inner and number in covered:
            continue
        if one.fold is not None:
            one.bind(one.fold)
        elif number in containers:
            one.bind(container_function(one.module, covered))
        elif kind is not None:
            one.bind(function_of([Step(one.module, kind)]))
        elif has_own_forward(type(one.module)):
            one.bind(user_function(one.module))


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def _leave(used: list[Binding]) -> None:
    for binding in used:
        binding.users -= 1
        if not binding.users:
            del _bindings[id(binding.module)]
            binding.close()
