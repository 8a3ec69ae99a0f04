"""The autograd side of full backward hooks: torch's class, with bug fixes."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from modkit._upstream import BackwardHook


class BackwardHooks(BackwardHook):
    """The full backward hooks and pre-hooks of one call of a module."""

    input_tensors_index: Any
    output_tensors_index: Any

    @override
    def setup_input_hook(self, args: Any) -> Any:
        torchs: Any = super()
        wrapped = torchs.setup_input_hook(tuple(args))
        if self.input_tensors_index is not None:
            return _like(args, wrapped)
        if not self.user_hooks:
            # Torch before 2.14 warns about full hooks that fire early, even if there are none.
            self.input_tensors_index = []
        return args

    @override
    def setup_output_hook(self, args: Any) -> Any:
        torchs: Any = super()
        if not isinstance(args, tuple):
            return torchs.setup_output_hook(args)
        wrapped = torchs.setup_output_hook(tuple(args))
        return args if self.output_tensors_index is None else _like(args, wrapped)


def backward_hooks(
    module: torch.nn.Module,
    hooks: Sequence[Callable[..., Any]],
    pre_hooks: Sequence[Callable[..., Any]],
) -> BackwardHook:
    """Return the hooks of one call; in compiled code torch's own class, which dynamo knows."""
    pre_hooks = [functools.partial(_call_pre_hook, hook) for hook in pre_hooks]
    if torch.compiler.is_compiling():
        return BackwardHook(module, hooks, pre_hooks)
    return BackwardHooks(module, hooks, pre_hooks)


def _call_pre_hook(hook: Callable[..., Any], module: torch.nn.Module, gradients: Any) -> Any:
    # A pre-hook may return one tensor instead of a tuple.
    result = hook(module, gradients)
    return (result,) if isinstance(result, torch.Tensor) else result


def _like(original: Any, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``items`` as the kind of tuple that ``original`` is."""
    kind: Any = type(original)
    # A pre-hook may have replaced the arguments by a list.
    if kind is tuple or issubclass(kind, list):
        return items
    rebuilt: tuple[Any, ...]
    if not hasattr(kind, "_fields"):
        try:
            rebuilt = kind(items)
            if len(rebuilt) == len(items) and all(map(operator.is_, rebuilt, items)):
                return rebuilt
        except Exception:  # noqa: BLE001, S110 - the class takes its items one by one
            pass
    rebuilt = kind(*items)
    return rebuilt
