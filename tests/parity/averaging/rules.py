"""Update rules that the tests of averaging share, and what a model goes through in between."""

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import network, normed_net


def training_states(model: torch.nn.Module, count: int) -> Iterator[int]:
    """Let the model go through ``count`` states, as training would."""
    for step in range(count):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))
            for buffer in model.buffers():
                noise = 3 * torch.rand(buffer.shape)
                buffer.copy_((buffer + noise).to(buffer.dtype))
        yield step


def states_after_updates(
    averaged: Any, model: torch.nn.Module, count: int
) -> list[dict[str, torch.Tensor]]:
    states = []
    for _ in training_states(model, count):
        averaged.update_parameters(model)
        states.append({name: one.clone() for name, one in averaged.state_dict().items()})
    return states


def decaying(averaged: torch.Tensor, current: torch.Tensor, count: Any) -> torch.Tensor:
    """Average as a user's own function would, with a weight that depends on the count."""
    weight = 1 / (1 + float(count)) ** 0.5
    return averaged * (1 - weight) + current * weight


def decaying_lists(averaged: Any, current: Any, count: Any) -> None:
    """Apply the rule to lists of tensors."""
    for target, source in zip(averaged, current, strict=True):
        target.copy_(decaying(target, source, count))


def state_after_updates(
    averaged: torch.nn.Module, *models: Any
) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """Update twice with each model; return the state and the text of an exception, if any."""
    problem = None
    try:
        for model in models:
            averaged.update_parameters(model)
            averaged.update_parameters(model)
    except Exception as error:
        problem = type(error).__name__, str(error)
    return averaged.state_dict(), problem


# How each update rule is asked for: arguments of AveragedModel, made of an implementation's names.
RULES: dict[str, Callable[[Implementation], dict[str, Any]]] = {
    "default": lambda impl: {},
    "avg_fn swa": lambda impl: {"avg_fn": impl.get_swa_avg_fn()},
    "avg_fn ema": lambda impl: {"avg_fn": impl.get_ema_avg_fn(0.8)},
    "avg_fn own": lambda impl: {"avg_fn": decaying},
    "multi_avg_fn swa": lambda impl: {"multi_avg_fn": impl.get_swa_multi_avg_fn()},
    "multi_avg_fn ema": lambda impl: {"multi_avg_fn": impl.get_ema_multi_avg_fn(0.8)},
    "multi_avg_fn own": lambda impl: {"multi_avg_fn": decaying_lists},
}


# A user class over a user class and a container; a layer with buffers; a container; a plain layer.
SUBJECTS: dict[str, Callable[[Implementation], Any]] = {
    "user": network,
    "norm": lambda impl: impl.nn.BatchNorm1d(3),
    "sequential": normed_net,
    "layer": lambda impl: impl.nn.Linear(3, 2),
}
every_subject = for_each("subject", SUBJECTS)


def build(impl: Implementation, subject: str) -> Any:
    """Build the model of a subject; all of them take inputs with three features."""
    return SUBJECTS[subject](impl)


def averaged_of(impl: Implementation, subject: str, updates: int = 2, **arguments: Any) -> Any:
    """Return a model, and its average after some updates."""
    model = build(impl, subject)
    averaged = impl.AveragedModel(model, **arguments)
    for _ in training_states(model, updates):
        averaged.update_parameters(model)
    return model, averaged


def through_pickle(averaged: Any) -> Any:
    """Return what comes back from pickle."""
    return pickle.loads(pickle.dumps(averaged))


def through_file(averaged: Any) -> Any:
    """Return what comes back from a file that holds the whole object."""
    file = io.BytesIO()
    torch.save(averaged, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
