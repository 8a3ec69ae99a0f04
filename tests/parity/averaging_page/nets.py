"""The models that each statement is tested with, and averages of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import network, tensors
from tests.parity.averaging.rules import training_states


def sequential(impl: Implementation) -> Any:
    """Build a container of layers."""
    nn = impl.nn
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


# A user class over a user class and a container; a layer with buffers; a container; a plain layer.
SUBJECTS: dict[str, Callable[[Implementation], Any]] = {
    "user": network,
    "norm": lambda impl: impl.nn.BatchNorm1d(3),
    "sequential": sequential,
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


def values(members: Any) -> list[Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in members]


def fractions(module: Any) -> dict[str, Tensor]:
    """Return the floating-point buffers by name."""
    return {name: b for name, b in module.named_buffers() if b.is_floating_point()}


def inputs(rows: int = 5) -> Tensor:
    """Return a batch that depends on nothing."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))


__all__ = [
    "SUBJECTS",
    "averaged_of",
    "build",
    "every_subject",
    "fractions",
    "inputs",
    "sequential",
    "tensors",
    "values",
]
