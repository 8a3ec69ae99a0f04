"""Networks with a module of each kind, and calls of them."""

from typing import Any

import torch
from torch import nn

from tests.helpers import Implementation
from tests.parity.fast_inference.twins import bits, called, left_behind
from tests.parity.module.module_cases import seed


class Block(nn.Module):
    """A residual block with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))
        self.ratio = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add a scaled branch."""
        branch: torch.Tensor = self.fc(self.norm(x)) * self.scale + self.shift
        return x + self.ratio * branch


class Net(nn.Module):
    """A stem, a list and a dict of blocks, and a head of nested containers."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.blocks = nn.ModuleList([block(), block()])
        self.named = nn.ModuleDict({"a": block()})
        self.head = nn.Sequential(
            nn.Dropout(0.0), nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.GELU()), nn.Linear(6, 3)
        )
        self.tied = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all of it."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.tied(self.named["a"](x))
        result: torch.Tensor = self.head(x)
        return result


_CLASSES: dict[str, type[nn.Module]] = {}


def net_class(impl: Implementation) -> type[nn.Module]:
    """Return the network's class with an implementation's Module as the base of all user classes."""
    if impl.name not in _CLASSES:
        base: Any = impl.nn.Module
        block: Any = type("Block", (Block, base), {"__module__": __name__})

        def build(self: Any) -> None:
            Net.__init__(self, block)

        _CLASSES[impl.name] = type("Net", (Net, base), {"__init__": build, "__module__": __name__})
    return _CLASSES[impl.name]


def net(impl: Implementation, start: int = 0) -> Any:
    """Build the network in eval mode, with statistics and affine parameters that matter."""
    seed(start)
    model = net_class(impl)().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return model


def extra(width: int = 6, out: int = 6) -> nn.Linear:
    """Make a layer with weights that tell it from all others."""
    layer = nn.Linear(width, out)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, layer.weight.numel()).view_as(layer.weight))
    return layer


def batch(rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make inputs for the network."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, 4, generator=generator, dtype=dtype)


def run(model: Any, mode: str = "grad", x: Any = None) -> Any:
    """Call the network; return the outcome, the gradients and the state."""
    model.zero_grad()
    x = batch() if x is None else x
    result = called(model, mode, (x.requires_grad_(x.is_floating_point()),), {})
    grads = [(name, bits(parameter.grad)) for name, parameter in model.named_parameters()]
    return result, grads, left_behind(model) if mode == "after" else None
