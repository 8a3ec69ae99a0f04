"""Modules that can be pickled: classes on module level, one per implementation."""

import torch

import modkit.nn


class Members:
    """The members of the net, whichever Module it derives from."""

    def fill(self) -> None:
        """Register one member of every kind."""
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("loose", torch.ones(1), persistent=False)
        self.config = {"width": 2, "names": ["a"]}
        self.tied = self.weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Scale, then hand on to the child if there is one."""
        value = value * self.weight + self.mean
        return self.child(value) if "child" in self._modules else value

    def count(self, *_: object) -> None:
        """Count the calls, as a hook that is a bound method."""
        self.calls = getattr(self, "calls", 0) + 1


class TorchNet(Members, torch.nn.Module):
    """The net on torch."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.fill()
        if depth:
            self.child = TorchNet(depth - 1)
            self.again = self.child


class ModkitNet(Members, modkit.nn.Module):
    """The net on modkit."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.fill()
        if depth:
            self.child = ModkitNet(depth - 1)
            self.again = self.child


NETS = {"torch": TorchNet, "modkit": ModkitNet}


def hook(*_: object) -> None:
    """Do nothing, under a name that pickle can find."""
