"""The autograd side of full backward hooks: two nodes around a module's part of the graph.

The positional arguments and the output of a call each pass through an identity function, so that
all their gradients come by in one place. The node of the output runs the pre-hooks and keeps the
gradients; the node of the arguments gives both to the hooks.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from modkit._messages import (
    MSG_BACKWARD_HOOK_AT_OUTPUT,
    MSG_BACKWARD_HOOK_LENGTH,
    MSG_BACKWARD_HOOK_NO_INPUT_GRADIENT,
    MSG_BACKWARD_PRE_HOOK_LENGTH,
)
from modkit._types import FunctionT
from modkit._upstream import BackwardHook, pass_through_one_node


Gradients = tuple[torch.Tensor | None, ...]
NodeHook = Callable[[Gradients, Gradients], Gradients | None]


def _node_hook(function: FunctionT) -> FunctionT:
    """Give what a node calls the name that torch's has, since autograd's errors show it."""
    function.__name__ = "hook"
    return function


class BackwardHooks:
    """The full backward hooks and pre-hooks of one call of a module.

    It is used as torch's ``BackwardHook`` is, which stands for it in compiled code.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        hooks: Sequence[Callable[..., Any]],
        pre_hooks: Sequence[Callable[..., Any]],
    ) -> None:
        self.module = module
        self.hooks = hooks
        self.pre_hooks = pre_hooks
        # Set while a backward pass is between the two nodes.
        self.grad_outputs: Gradients | None = None
        # At which positions there are tensors, where the tensors pass through a node.
        self.inputs: list[int] | None = None
        self.outputs: list[int] = []
        self.n_inputs = 0
        self.n_outputs = 0

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with their tensors behind a node, if any of them has a gradient."""
        self.n_inputs = len(args)
        wrapped, self.inputs = _wrap(args, self._at_inputs)
        return wrapped

    def setup_output_hook(self, result: Any) -> Any:
        """Return the output with its tensors behind a node, if any of them has a gradient."""
        items: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        self.n_outputs = len(items)
        wrapped, outputs = _wrap(items, self._at_outputs)
        self.outputs = outputs or []
        return wrapped if isinstance(result, tuple) else wrapped[0]

    @_node_hook
    def _at_inputs(self, grad_inputs: Gradients, _: Gradients) -> Gradients | None:
        # In a double backward gradients may get here that did not pass the outputs.
        if self.grad_outputs is None or self.inputs is None:
            return None
        gradients = _scatter(grad_inputs, self.inputs, self.n_inputs)
        for hook in self.hooks:
            changed = hook(self.module, gradients, self.grad_outputs)
            if changed is None:
                continue
            if len(changed) != len(gradients):
                raise RuntimeError(
                    MSG_BACKWARD_HOOK_LENGTH.format(got=len(changed), expected=len(gradients))
                )
            gradients = changed
        self.grad_outputs = None
        return tuple(gradients[index] for index in self.inputs)

    @_node_hook
    def _at_outputs(self, _: Gradients, grad_outputs: Gradients) -> Gradients:
        gradients = self._run_pre_hooks(_scatter(grad_outputs, self.outputs, self.n_outputs))
        self.grad_outputs = gradients
        if self.inputs is None:
            # No gradient will come by at the inputs, so the hooks run here.
            if self.hooks:
                warnings.warn(MSG_BACKWARD_HOOK_AT_OUTPUT, stacklevel=5)
                self._run_without_inputs(gradients)
            self.grad_outputs = None
        return tuple(gradients[index] for index in self.outputs)

    def _run_pre_hooks(self, gradients: Gradients) -> Gradients:
        for hook in self.pre_hooks:
            changed = _call_pre_hook(hook, self.module, gradients)
            if changed is None:
                continue
            if len(changed) != self.n_outputs:
                raise RuntimeError(
                    MSG_BACKWARD_PRE_HOOK_LENGTH.format(got=len(changed), expected=self.n_outputs)
                )
            gradients = changed
        return gradients

    def _run_without_inputs(self, grad_outputs: Gradients) -> None:
        grad_inputs = (None,) * self.n_inputs
        for hook in self.hooks:
            result = hook(self.module, grad_inputs, grad_outputs)
            if result is None or (
                isinstance(result, tuple) and all(gradient is None for gradient in result)
            ):
                continue
            raise RuntimeError(MSG_BACKWARD_HOOK_NO_INPUT_GRADIENT)


# Dynamo knows torch's class, and puts its own code in its place.
_CompiledBackwardHooks = cast("type[BackwardHooks]", BackwardHook)


def backward_hooks(
    module: torch.nn.Module,
    hooks: Sequence[Callable[..., Any]],
    pre_hooks: Sequence[Callable[..., Any]],
) -> BackwardHooks:
    """Make what a call with full backward hooks needs, in compiled code or not."""
    if torch.compiler.is_compiling():
        pre_hooks = [functools.partial(_call_pre_hook, hook) for hook in pre_hooks]
        return _CompiledBackwardHooks(module, hooks, pre_hooks)
    return BackwardHooks(module, hooks, pre_hooks)


def _call_pre_hook(hook: Callable[..., Any], module: torch.nn.Module, gradients: Gradients) -> Any:
    """Call a pre-hook, which may return one tensor instead of a tuple."""
    result = hook(module, gradients)
    return (result,) if isinstance(result, torch.Tensor) else result


def _wrap(items: tuple[Any, ...], hook: NodeHook) -> tuple[tuple[Any, ...], list[int] | None]:
    """Put the tensors among ``items`` behind one node that calls ``hook``; tell where they are."""
    where = [index for index, item in enumerate(items) if isinstance(item, torch.Tensor)]
    tensors = [items[index] for index in where]
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return items, None
    wrapped, node = pass_through_one_node(tensors)
    node.register_hook(hook)
    replaced = list(items)
    for index, tensor in zip(where, wrapped, strict=True):
        replaced[index] = tensor
    return _like(items, replaced), where


def _like(original: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return ``items`` as the kind of tuple that ``original`` is."""
    kind: Any = type(original)
    # A pre-hook may have put a list in the place of the arguments.
    if kind is tuple or issubclass(kind, list):
        return tuple(items)
    rebuilt = None if hasattr(kind, "_fields") else _from_iterable(kind, items)
    if rebuilt is None:
        # Named tuples, and what else takes its items one by one.
        rebuilt = kind(*items)
    return rebuilt


def _from_iterable(kind: Callable[..., Any], items: list[Any]) -> tuple[Any, ...] | None:
    """Return the tuple of ``items`` if the class makes one from them, as most classes do."""
    try:
        rebuilt: tuple[Any, ...] = kind(items)
    except Exception:  # noqa: BLE001 - a constructor that takes something else fails in its own way
        return None
    same = len(rebuilt) == len(items) and all(map(operator.is_, rebuilt, items))
    return rebuilt if same else None


def _scatter(gradients: Gradients, where: Sequence[int], size: int) -> Gradients:
    """Return ``size`` slots with the gradients at their positions and None elsewhere."""
    slots: list[torch.Tensor | None] = [None] * size
    for index, gradient in zip(where, gradients, strict=True):
        slots[index] = gradient
    return tuple(slots)
