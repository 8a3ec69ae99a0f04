"""The hooks of a call that torch asks for; everything else about hooks is torch's own."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from modkit.nn._overrides import of_torch, standard


Hook = Callable[..., Any]


@standard
def _get_backward_pre_hooks(self: torch.nn.Module) -> list[Hook]:
    """Return the full backward pre-hooks of a call, global ones first.

    Torch calls this for each call of a module that has such hooks, so nothing is registered in
    another form: the tables hold the user's own functions, as libraries that read them expect.

    Returns:
        The hooks in the order in which they run. Each may return a tensor in place of a tuple.
    """
    hooks = of_torch(self, "_get_backward_pre_hooks")()
    return [functools.partial(_as_tuple, hook) for hook in hooks]


def _as_tuple(hook: Hook, module: torch.nn.Module, gradients: Any) -> Any:
    # Torch would take a tensor, which its documentation allows, apart into rows, and say that their
    # number is not that of the outputs: https://github.com/pytorch/pytorch/issues/102645
    result = hook(module, gradients)
    return (result,) if isinstance(result, torch.Tensor) else result
