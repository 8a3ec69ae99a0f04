"""The autograd side of full backward hooks: two nodes around a module's part of the graph.

The positional arguments and the output of a call each pass through an identity function, whose
backward sees all their gradients. The node of the output runs the pre-hooks and stores the
gradients; the node of the arguments passes both to the hooks.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch

from modkit._types import FunctionT
from modkit._upstream import BackwardHook, pass_through_one_node


Gradients = tuple[torch.Tensor | None, ...]
NodeHook = Callable[[Gradients, Gradients], Gradients | None]


_MSG_AT_OUTPUT: Final = (
    "Full backward hook is firing when gradients are computed "
    "with respect to module outputs since no inputs require gradients. See "
    "https://docs.pytorch.org/docs/main/generated/torch.nn.Module.html"
    "#torch.nn.Module.register_full_backward_hook "
    "for more details."
)


def _node_hook(function: FunctionT) -> FunctionT:
    # The name of torch's function, since autograd's errors show it.
    function.__name__ = "hook"
    return function


class BackwardHooks:
    """The full backward hooks and pre-hooks of one call; torch's ``BackwardHook`` in compiled code."""

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
        # The positions of tensors, if they pass through a node.
        self.inputs: list[int] | None = None
        self.outputs: list[int] = []
        self.n_inputs = 0
        self.n_outputs = 0

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, their tensors behind a node if one requires a gradient."""
        self.n_inputs = len(args)
        wrapped, self.inputs = _wrap(args, self._at_inputs)
        return wrapped

    def setup_output_hook(self, result: Any) -> Any:
        """Return the output, its tensors behind a node if one requires a gradient."""
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
                    "Backward hook returned an invalid number of grad_input, "
                    f"got {len(changed)}, but expected {len(gradients)}"
                )
            gradients = changed
        self.grad_outputs = None
        return tuple(gradients[index] for index in self.inputs)

    @_node_hook
    def _at_outputs(self, _: Gradients, grad_outputs: Gradients) -> Gradients:
        gradients = self._run_pre_hooks(_scatter(grad_outputs, self.outputs, self.n_outputs))
        self.grad_outputs = gradients
        if self.inputs is None:
            # No gradient reaches the inputs, so the hooks run here.
            if self.hooks:
                warnings.warn(_MSG_AT_OUTPUT, stacklevel=5)
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
                    "Backward pre hook returned an invalid number of grad_output, "
                    f"got {len(changed)}, but expected {self.n_outputs}"
                )
            gradients = changed
        return gradients

    def _run_without_inputs(self, grad_outputs: Gradients) -> None:
        grad_inputs = (None,) * self.n_inputs
        for hook in self.hooks:
            result = hook(self.module, grad_inputs, grad_outputs)
            if result is not None and not (
                isinstance(result, tuple) and all(gradient is None for gradient in result)
            ):
                raise RuntimeError(
                    "Backward hook for Modules where no input requires "
                    "gradient should always return None or None for all gradients."
                )


def backward_hooks(
    module: torch.nn.Module,
    hooks: Sequence[Callable[..., Any]],
    pre_hooks: Sequence[Callable[..., Any]],
) -> BackwardHooks:
    """Return the hooks of one call; in compiled code torch's class, which dynamo knows."""
    if torch.compiler.is_compiling():
        pre_hooks = [functools.partial(_call_pre_hook, hook) for hook in pre_hooks]
        return cast("type[BackwardHooks]", BackwardHook)(module, hooks, pre_hooks)
    return BackwardHooks(module, hooks, pre_hooks)


def _call_pre_hook(hook: Callable[..., Any], module: torch.nn.Module, gradients: Gradients) -> Any:
    # A pre-hook may return one tensor instead of a tuple.
    result = hook(module, gradients)
    return (result,) if isinstance(result, torch.Tensor) else result


def _wrap(items: tuple[Any, ...], hook: NodeHook) -> tuple[tuple[Any, ...], list[int] | None]:
    """Put the tensors among ``items`` behind one node that calls ``hook``; return their positions."""
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
    # A pre-hook may have replaced the arguments by a list.
    if kind is tuple or issubclass(kind, list):
        return tuple(items)
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


def _scatter(gradients: Gradients, where: Sequence[int], size: int) -> Gradients:
    """Return ``size`` slots with the gradients at their positions and None elsewhere."""
    slots: list[torch.Tensor | None] = [None] * size
    for index, gradient in zip(where, gradients, strict=True):
        slots[index] = gradient
    return tuple(slots)
