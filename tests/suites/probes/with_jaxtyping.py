import dataclasses

import jaxtyping
import torch
from beartype import beartype
from jaxtyping import Float, Int, jaxtyped

from tests.suites.probes.user_files import written


SOURCE = """
import torch
import {nn} as nn
from jaxtyping import Float


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x: Float[torch.Tensor, "batch width"]) -> Float[torch.Tensor, "batch 2"]:
        return self.linear(x)
"""


def _refusal(function, *args):
    try:
        function(*args)
    except jaxtyping.TypeCheckError as error:
        # The first line names the function, the others the place and the values.
        return type(error).__name__, str(error).splitlines()[0]
    return "accepted"


def _net(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 3)

        @jaxtyped(typechecker=beartype)
        def forward(
            self, x: Int[torch.Tensor, "batch time"]
        ) -> Float[torch.Tensor, "batch time 3"]:
            return self.head(self.embed(x))

    return Net()


def forward(nn):
    net = _net(nn)
    tokens = torch.randint(0, 11, (2, 3))
    return net(tokens), _refusal(net, tokens.float()), _refusal(net, tokens[0]), net


def dataclass_of_a_module(nn):
    @jaxtyped(typechecker=beartype)
    @dataclasses.dataclass(eq=False)
    class Scale(nn.Module):
        by: Float[torch.Tensor, "d"]
        times: int = 1

        def __post_init__(self):
            super().__init__()

        def forward(self, x):
            return x * self.by * self.times

    # A dataclass assigns its fields before `__init__` of the module: torch accepts plain attributes.
    return Scale(torch.ones(2))(torch.ones(1, 2)), _refusal(Scale, torch.ones(2, 2))


def exported(nn):
    return str(torch.export.export(_net(nn), (torch.zeros(2, 3, dtype=torch.long),)).graph)


def a_file_under_the_import_hook(nn):
    with written(nn, SOURCE), jaxtyping.install_import_hook("users_networks", "beartype.beartype"):
        import users_networks as users

        net = users.Net(3)
        return net(torch.ones(4, 3)), _refusal(net, torch.ones(3)), _refusal(users.Net, "3")
