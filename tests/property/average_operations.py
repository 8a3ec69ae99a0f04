"""Operations on averages of a tree: `AveragedModel` of each library, and modkit's `EMA`."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from tests.property import choices
from tests.property.node_tools import LOG
from tests.property.observation import distinct_modules, observe
from tests.property.operations import Skipped, operation


FUNCTIONS: Final = ("default", "ema", "swa", "multi ema", "multi swa")


def silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the calls of the average, since torch's walks the tree differently."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            LOG.clear()

    return wrapper


def members(model: Any) -> list[Any]:
    """List names, shapes, dtypes and ties of the parameters and buffers."""
    seen: dict[int, int] = {}
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    return [
        (name, None if is_lazy(t) else t.shape, t.dtype, seen.setdefault(id(t), len(seen)))
        for name, t in named
    ]


@operation(choices.sampled_from(FUNCTIONS), choices.booleans())
@silent
def make_averaged_model(side: Any, module: Any, function: str, use_buffers: bool) -> list[Any]:
    """Average the tree with one of the library's functions."""
    utils = side.impl.swa_utils
    attributes = (v for module in distinct_modules(side.model) for v in module.__dict__.values())
    tensors = [*side.model.parameters(), *side.model.buffers()]
    tensors += [value for value in attributes if isinstance(value, torch.Tensor)]
    if any(is_lazy(tensor) or not tensor.is_leaf for tensor in tensors):
        raise Skipped
    options: dict[str, Any] = {
        "default": {},
        "ema": {"avg_fn": utils.get_ema_avg_fn(0.5)},
        "swa": {"avg_fn": utils.get_swa_avg_fn()},
        "multi ema": {"multi_avg_fn": utils.get_ema_multi_avg_fn(0.5)},
        "multi swa": {"multi_avg_fn": utils.get_swa_multi_avg_fn()},
    }[function]
    floating = all(b.is_floating_point() for b in side.model.buffers())
    averaged = utils.AveragedModel(side.model, use_buffers=use_buffers and floating, **options)
    side.averages[:] = [averaged]
    return observe(averaged.module)


@operation(
    choices.sampled_from(["update", "update", "update", "call", "state", "load", "copy", "pickle"])
)
@silent
def use_averaged_model(side: Any, module: Any, method: str) -> Any:
    """Update the average, or use it."""
    if not side.averages:
        raise Skipped
    averaged = side.averages[0]
    if method == "update":
        # Torch's average cannot be updated twice without parameters, a listed difference.
        if not [*side.model.parameters()] or members(side.model) != members(averaged.module):
            raise Skipped
        averaged.update_parameters(side.model)
    elif method == "call":
        with torch.no_grad():
            return averaged(torch.ones(2, 3))
    elif method == "state":
        return averaged.state_dict()
    elif method == "load":
        return repr(averaged.load_state_dict(averaged.state_dict()))
    elif method == "copy":
        side.averages[0] = averaged = copy.deepcopy(averaged)
    elif averaged.avg_fn is not None or averaged.multi_avg_fn is not None:
        raise Skipped
    else:
        side.averages[0] = averaged = pickle.loads(pickle.dumps(averaged))
    return averaged.n_averaged, observe(averaged.module)


@operation(choices.booleans())
def state_of_average(side: Any, module: Any, load: bool) -> Any:
    """Save the state of an EMA, perhaps to load it again."""
    if side.ema is None:
        raise Skipped
    state = side.ema.state_dict()
    if load:
        side.ema.load_state_dict(copy.deepcopy(state))
    return sorted(state)
