"""Networks that every tool must accept, built from whichever ``nn`` namespace is handed in.

A factory defines its classes anew, the way a user's file does after ``import modkit.nn as nn``.
``PICKLABLE`` holds the one network whose classes can be imported by name, once per implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Final, TypeVar

import torch
from torch import Tensor

import modkit.nn
from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything


ResultT = TypeVar("ResultT")


def conv_net(nn: ModuleType) -> torch.nn.Module:
    """Build a convolutional classifier with BatchNorm."""

    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(4, 6, 3),
                nn.BatchNorm2d(6),
                nn.GELU(),
                nn.AdaptiveAvgPool2d(1),
            )
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.flatten(self.features(x), 1))

    return ConvNet()


def lstm_net(nn: ModuleType) -> torch.nn.Module:
    """Build a sequence classifier around an LSTM."""

    class LSTMNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            output, (_hidden, _cell) = self.lstm(self.embed(x))
            return self.head(output[:, -1])

    return LSTMNet()


def nested_net(nn: ModuleType) -> torch.nn.Module:
    """Build a network of user-written blocks held by a ModuleList and a ModuleDict."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.linear = nn.Linear(width, width)
            self.act = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.act(self.linear(self.norm(x)))

    class NestedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(6), Block(6)])
            self.heads = nn.ModuleDict({"left": nn.Linear(6, 3), "right": nn.Linear(6, 3)})

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            total = x[:, :3]
            for head in self.heads.values():
                total = total + head(x)
            return total

    return NestedNet()


@dataclass(frozen=True)
class Network:
    """A factory together with inputs that its network accepts."""

    build: Callable[[ModuleType], torch.nn.Module]
    batch: Callable[[], Tensor]


def _features() -> Tensor:
    return torch.randn(4, 6)


def _tokens() -> Tensor:
    return torch.randint(0, 11, (4, 7))


NETWORKS: Final[dict[str, Network]] = {
    "conv": Network(conv_net, lambda: torch.randn(4, 1, 8, 8)),
    "lstm": Network(lstm_net, _tokens),
    "nested": Network(nested_net, _features),
}


def make_net(nn: ModuleType, name: str) -> torch.nn.Module:
    """Build the network of that name from the same random numbers each time."""
    seed_everything()
    return NETWORKS[name].build(nn)


def make_batch(name: str) -> Tensor:
    """Draw the same batch each time for the network of that name."""
    seed_everything(1)
    return NETWORKS[name].batch()


class PicklableBody:
    """The body that the two importable networks share."""

    nn: ClassVar[ModuleType]

    def __init__(self) -> None:
        super().__init__()
        nn = self.nn
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.w = nn.Parameter(torch.randn(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3)})

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of features."""
        self.calls += 1
        return self.heads["a"](self.stem(x) * self.w)


class TorchPicklable(PicklableBody, torch.nn.Module):
    """The importable network on ``torch.nn``."""

    nn = torch.nn


class ModkitPicklable(PicklableBody, modkit.nn.Module):
    """The importable network on ``modkit.nn``."""

    nn = modkit.nn


PICKLABLE: Final[dict[str, type[torch.nn.Module]]] = {
    "torch": TorchPicklable,
    "modkit": ModkitPicklable,
}


def agree(scenario: Callable[[Implementation], ResultT]) -> ResultT:
    """Assert that the scenario is bitwise identical on both, and return torch's result.

    Unlike ``same`` it lets an exception through: these tools must work, not fail alike.
    """
    seed_everything()
    expected = scenario(TORCH)
    frozen = freeze(expected)
    seed_everything()
    assert freeze(scenario(MODKIT)) == frozen
    return expected


def gradients(net: torch.nn.Module) -> dict[str, Tensor | None]:
    """Collect the gradient of every parameter by name."""
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def train(
    net: torch.nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    """Take three steps towards outputs of zero and return the loss of each."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
