"""The recipe for momentum teachers, beside teachers written by hand."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import modkit
from tests.cases import for_each
from tests.helpers import freeze


MOMENTUM = 0.99


class Network(nn.Module):
    """A network with batch normalization and dropout."""

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embedding."""
        return self.head(self.drop(self.body(x)))


def by_hand(student: nn.Module, teacher: nn.Module) -> Callable[[], None]:
    """Return the update that implementations write."""

    @torch.no_grad()
    def update() -> None:
        for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
            average.lerp_(weight, 1 - MOMENTUM)

    return update


def by_recipe(student: nn.Module, teacher: nn.Module) -> Callable[[], None]:
    """Return the update of the recipe."""
    ema = modkit.EMA(student, MOMENTUM, buffers={"*": "ignore"})
    ema.update()

    def update() -> None:
        ema.update()
        ema.copy_to(teacher)

    return update


def train(kind: Any, drop: float, views: int, dtype: torch.dtype = torch.float32) -> Any:
    """Train a student on the outputs of its teacher, and return all losses and states."""
    torch.manual_seed(0)
    student = Network().to(dtype)
    teacher = copy.deepcopy(student).requires_grad_(False)
    teacher.drop.p = drop
    predictor = nn.Linear(3, 3).to(dtype)
    optimizer = torch.optim.SGD([*student.parameters(), *predictor.parameters()], lr=0.1)
    update = kind(student, teacher)
    losses = []
    for _ in range(30):
        batch = [torch.randn(16, 4, dtype=dtype) for _ in range(views)]
        with torch.no_grad():
            targets = [teacher(view) for view in batch]
        predictions = [predictor(student(view)) for view in batch]
        loss = sum(
            (1 - nn.functional.cosine_similarity(one, other)).mean()
            for one, other in zip(predictions, reversed(targets), strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update()
        losses.append(loss.item())
    return losses, freeze(dict(student.state_dict())), freeze(dict(teacher.state_dict()))


@for_each("drop", [0.0, 0.2])
@for_each("views", [1, 2])
@for_each("dtype", [torch.float32, torch.float64])
def test_the_recipe_is_a_teacher_written_by_hand(
    drop: float, views: int, dtype: torch.dtype
) -> None:
    """Losses, students, and teachers with their statistics are bitwise identical."""
    assert train(by_recipe, drop, views, dtype) == train(by_hand, drop, views, dtype)


def test_calling_the_average_is_not_a_teacher() -> None:
    """It is in eval mode, with the student's statistics, as its documentation says."""
    torch.manual_seed(0)
    student = Network(0.0)
    teacher = copy.deepcopy(student).requires_grad_(False)
    ema = modkit.EMA(student, MOMENTUM)
    ema.update()
    batch = torch.randn(16, 4)

    assert not torch.allclose(ema(batch), teacher(batch), atol=0.1)
    assert ema.module.train()(batch).equal(teacher(batch))
    assert "training mode" in str(type(ema).__call__.__doc__)
