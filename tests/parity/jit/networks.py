"""The network of the tests of ScriptModule, in each of the ways to get a compiled one."""

import io
from typing import Any

import torch

from tests.helpers import Implementation


KINDS = ("scripted", "traced", "loaded", "frozen", "class-based")


def make_net(impl: Implementation, base: Any = None) -> Any:
    """Build an eager network with a parameter, a buffer, a constant, attributes and a child."""

    class Net(base or impl.nn.Module):
        __constants__ = ["factor"]

        def __init__(self):
            super().__init__()
            self.lin = impl.nn.Linear(3, 2)
            self.norm = impl.nn.BatchNorm1d(2)
            self.gain = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
            self.register_buffer("shift", torch.tensor([0.5, 1.5]))
            self.factor = 3
            self.ratio = 0.25

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
            self.lin = impl.nn.Linear(3, 2)
            self.norm = impl.nn.BatchNorm1d(2)
            self.gain = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
            self.register_buffer("shift", torch.tensor([0.5, 1.5]))
            self.factor = 3
            self.ratio = 0.25

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
