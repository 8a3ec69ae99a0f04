"""The network of the tests of ScriptModule, in each of the ways to get a compiled one."""

import io
from typing import Any

import pytest
import torch

from tests.helpers import Implementation


# Torch says at every step that TorchScript is deprecated, and batch normalization looks at sizes.
jit_tests = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
KINDS = ("scripted", "traced", "loaded", "frozen", "class-based")


def _fill(net: Any, impl: Implementation) -> None:
    net.lin = impl.nn.Linear(3, 2)
    net.norm = impl.nn.BatchNorm1d(2)
    net.gain = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    net.register_buffer("shift", torch.tensor([0.5, 1.5]))
    net.factor = 3
    net.ratio = 0.25


def make_net(impl: Implementation) -> Any:
    """Build an eager network with a parameter, a buffer, a constant, attributes and a child."""

    class Net(impl.nn.Module):
        __constants__ = ["factor"]

        def __init__(self):
            super().__init__()
            _fill(self, impl)

        def forward(self, x):
            return self.norm(self.lin(x)) * self.gain * self.factor + self.shift

    torch.manual_seed(5)
    return Net()


def make_class_based(impl: Implementation) -> Any:
    """Build the same network as a class with a script method."""

    class Net(impl.jit.ScriptModule):
        __constants__ = ["factor"]

        def __init__(self):
            super().__init__()
            _fill(self, impl)

        @impl.jit.script_method
        def forward(self, x):
            return self.norm(self.lin(x)) * self.gain * self.factor + self.shift

    torch.manual_seed(5)
    return Net()


def inputs() -> torch.Tensor:
    """Return a batch of four."""
    return torch.linspace(-1, 1, 12).view(4, 3)


def build(impl: Implementation, kind: str) -> Any:
    """Return the network, compiled in the way that ``kind`` says."""
    if kind == "class-based":
        return make_class_based(impl)
    net = make_net(impl)
    if kind == "traced":
        return impl.jit.trace(net, inputs(), check_trace=False)
    script = impl.jit.script(net)
    if kind == "frozen":
        return impl.jit.freeze(script.eval())
    return reloaded(impl, script) if kind == "loaded" else script


def reloaded(impl: Implementation, script: Any, **options: Any) -> Any:
    """Return what comes of saving and loading."""
    buffer = io.BytesIO()
    impl.jit.save(script, buffer)
    buffer.seek(0)
    return impl.jit.load(buffer, **options)
