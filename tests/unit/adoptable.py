"""Models that know nothing of modkit, which the tests of ``modkit.adopt`` adopt."""

import copyreg
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A block with members of every kind, a property and a call of ``super``."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.register_buffer("offset", torch.rand(width))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    @property
    def width(self) -> int:
        """The number of features."""
        return self.linear.in_features

    def extra_repr(self) -> str:
        """Return what torch's class does, and the width."""
        return f"{super().extra_repr()}width={self.width}"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with the block's share."""
        return x + torch.relu(self.linear(self.norm(x))) * self.scale + self.offset


class Net(nn.Module):
    """Blocks, one of them used twice, and a list that leads back to the network."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.shared = self.blocks[0]
        self.shared.parent = [self]
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two scores for each row of ``x``."""
        return self.head(self.shared(self.blocks(x)))


class WithState(nn.Linear):
    """A layer that leaves something out of its pickles, and puts it back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.handle = object()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "handle": "opened again"})


class WithReduce(nn.Module):
    """A module that is pickled as the arguments of its constructor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def __reduce__(self) -> Any:
        return type(self), (self.linear.in_features,), {"_version_of_state": 1, **self.__dict__}


class WithNew(nn.Module):
    """A module whose ``__new__`` needs an argument."""

    def __new__(cls, label: str) -> Any:
        """Keep ``label`` in an attribute."""
        self = super().__new__(cls)
        object.__setattr__(self, "made_with", label)
        return self

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def __getnewargs__(self) -> tuple[str]:
        return (self.label,)


class Registered(nn.Module):
    """A module that the table of ``copyreg`` knows how to pickle."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label


def _reduce_registered(module: Registered) -> Any:
    return Registered, (f"{module.label} by copyreg",)


copyreg.pickle(Registered, _reduce_registered)


class ByName(nn.Module):
    """A module of which there is one, pickled as the name of a global variable."""

    def __reduce__(self) -> str:
        return "BY_NAME"


BY_NAME = ByName()
