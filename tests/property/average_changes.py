"""Changes that training scripts make to a model, and to its average, between two updates."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.property.zoo import memory_of, tensors


# Returns the model and the average to go on with: the same objects, or copies of both.
Change = Callable[[nn.Module, Any], tuple[nn.Module, Any]]


def nothing(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Go on."""
    return model, ema


def shifted(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in memory of its own, with other values if they are numbers."""
    copied = tensor.detach().clone()
    if copied.is_floating_point():
        copied.mul_(0.5)
    return copied


def load_assign(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Replace all tensors by those of a state dict; tied names stay tied."""
    new: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in new:
            copied = shifted(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            new[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        state[name] = new[id(tensor)]
    model.load_state_dict(state, assign=True)
    return model, ema


def swap_tensors(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Give each tensor object the content of another one."""
    for tensor in tensors(model).values():
        other = shifted(tensor)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, other)
    return model, ema


def deep_copy(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Go on with copies of the model and of its average."""
    copied: tuple[nn.Module, Any] = copy.deepcopy((model, ema))
    return copied


def pickled(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Go on with what a pickle of the model and of its average holds."""
    loaded: tuple[nn.Module, Any] = pickle.loads(pickle.dumps((model, ema)))
    return loaded


def data(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Give each second tensor other memory, and write to the others, both through ``.data``."""
    for index, tensor in enumerate(tensors(model).values()):
        if index % 2:
            tensor.data = shifted(tensor)
        elif tensor.is_floating_point():
            memory_of(tensor.data).mul_(0.5)
    return model, ema


def requires_grad(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Freeze what trains, and train what is frozen."""
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(not parameter.requires_grad)
    return model, ema


def cast(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Give all floating-point tensors of the model another dtype."""
    model.double()
    if hasattr(model, "center"):
        # Torch makes two buffers of one that has two names.
        model.center = model.mean
    return model, ema


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        nothing,
        load_assign,
        swap_tensors,
        deep_copy,
        pickled,
        data,
        requires_grad,
        cast,
    )
}
