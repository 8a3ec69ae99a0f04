"""The hooks of a call that torch asks for; everything else about hooks is torch's own."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from modkit.nn._overrides import TorchModule, standard


Hook = Callable[..., Any]


@standard
def _get_backward_pre_hooks(self: torch.nn.Module) -> list[Hook]:
    """Return the full backward pre-hooks of a call, global ones first; a hook may return a tensor."""
    hooks = TorchModule._get_backward_pre_hooks(self)
    return [functools.partial(_as_tuple, hook) for hook in hooks]


def _as_tuple(hook: Hook, module: torch.nn.Module, gradients: Any) -> Any:
    # Torch would take a tensor, which its documentation allows, apart into rows.
    result = hook(module, gradients)
    return (result,) if isinstance(result, torch.Tensor) else result
