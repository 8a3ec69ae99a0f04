"""The classes of torch's note on modules, built on either implementation."""

import functools
from types import SimpleNamespace

import torch

from tests.helpers import Implementation


@functools.cache
def networks(impl: Implementation) -> SimpleNamespace:
    """Define the note's classes on `impl.own`."""
    return SimpleNamespace(**_building_blocks(impl), **_stateful_modules(impl))


def _building_blocks(impl: Implementation) -> dict[str, type]:
    nn = impl.own
    F = impl.submodule("nn.functional")

    class MyLinear(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(in_features, out_features))
            self.bias = nn.Parameter(torch.randn(out_features))

        def forward(self, x):
            return (x @ self.weight) + self.bias

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l0 = MyLinear(4, 3)
            self.l1 = MyLinear(3, 1)

        def forward(self, x):
            x = self.l0(x)
            x = F.relu(x)
            return self.l1(x)

    class BigNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = MyLinear(5, 4)
            self.net = Net()

        def forward(self, x):
            return self.net(self.l1(x))

    class DynamicNet(nn.Module):
        def __init__(self, num_layers):
            super().__init__()
            self.linears = nn.ModuleList([MyLinear(4, 4) for _ in range(num_layers)])
            self.activations = nn.ModuleDict({"relu": nn.ReLU(), "lrelu": nn.LeakyReLU()})
            self.final = MyLinear(4, 1)

        def forward(self, x, act):
            for linear in self.linears:
                x = linear(x)
            x = self.activations[act](x)
            return self.final(x)

    return {"MyLinear": MyLinear, "Net": Net, "BigNet": BigNet, "DynamicNet": DynamicNet}


def _stateful_modules(impl: Implementation) -> dict[str, type]:
    nn = impl.own

    class ModalModule(nn.Module):
        def __init__(self):
            super().__init__()

        def forward(self, x):
            if self.training:
                return x + 1.0
            return x

    class RunningMean(nn.Module):
        def __init__(self, num_features, momentum=0.9):
            super().__init__()
            self.momentum = momentum
            self.register_buffer("mean", torch.zeros(num_features))

        def forward(self, x):
            self.mean = self.momentum * self.mean + (1.0 - self.momentum) * x
            return self.mean

    class StatefulModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.param1 = nn.Parameter(torch.randn(2))
            self.register_parameter("param2", nn.Parameter(torch.randn(3)))
            self.register_parameter("param3", None)
            self.param_list = nn.ParameterList([nn.Parameter(torch.randn(2)) for i in range(3)])
            self.param_dict = nn.ParameterDict(
                {"foo": nn.Parameter(torch.randn(3)), "bar": nn.Parameter(torch.randn(4))}
            )
            self.register_buffer("buffer1", torch.randn(4), persistent=True)
            self.register_buffer("buffer2", torch.randn(5), persistent=False)
            self.register_buffer("buffer3", None)
            self.linear = nn.Linear(2, 3)

    return {
        "ModalModule": ModalModule,
        "RunningMean": RunningMean,
        "StatefulModule": StatefulModule,
    }
