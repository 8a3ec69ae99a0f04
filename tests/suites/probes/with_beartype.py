from typing import Annotated

import torch
from beartype import beartype
from beartype.claw import beartype_package
from beartype.door import TypeHint, is_bearable, is_subhint
from beartype.roar import BeartypeException
from beartype.vale import Is, IsAttr, IsInstance, IsSubclass

from tests.suites.probes.user_files import imported, written


def _refusal(function, *args):
    """Return the class and the text of a refusal, with the names of one library."""
    try:
        function(*args)
    except BeartypeException as error:
        return type(error).__name__, str(error).replace(
            "modkit.nn.Module", "torch.nn.modules.module.Module"
        )
    return "accepted"


def layers_are_modules(nn):
    return [
        is_bearable(each, nn.Module)
        for each in (
            nn.Linear(2, 2),
            nn.Sequential(),
            torch.nn.ReLU(),
            torch.nn.Module(),
            3,
            nn.Linear,
        )
    ]


def containers_of_modules(nn):
    layers = [nn.Linear(2, 2), nn.ReLU()]
    return [
        is_bearable(layers, list[nn.Module]),
        is_bearable({"a": layers[0]}, dict[str, nn.Module]),
        is_bearable((layers[0], 1), tuple[nn.Module, int]),
        is_bearable([1], list[nn.Module]),
        is_bearable(None, nn.Module | None),
        is_bearable(nn.ReLU, type[nn.Module]),
        is_bearable(torch.Tensor, type[nn.Module]),
    ]


def hints_are_ordered(nn):
    with imported(nn) as users:
        kinds = [nn.Module, nn.Linear, users.Block, users.Wide]
        return [[is_subhint(a, b) for a in kinds] for b in kinds], TypeHint(users.Wide) <= TypeHint(
            nn.Module
        )


def decorated_class(nn):
    @beartype
    class Net(nn.Module):
        def __init__(self, body: nn.Module, width: int) -> None:
            super().__init__()
            self.body = body
            self.width = width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    net = Net(nn.Linear(2, 2), 2)
    return net(torch.ones(1, 2)), _refusal(Net, nn.ReLU(), "2"), _refusal(Net, "body", 2), net


def validators(nn):
    deep = Annotated[nn.Module, Is[lambda m: sum(1 for _ in m.modules()) > 2]]
    linear = Annotated[object, IsInstance[nn.Module]]
    kind = Annotated[type, IsSubclass[nn.Module]]
    training = Annotated[nn.Module, IsAttr["training", Is[lambda value: value]]]
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return [
        [is_bearable(each, hint) for hint in (deep, linear, kind, training)]
        for each in (net, nn.ReLU(), net.eval(), nn.Linear, 3)
    ]


def a_file_under_the_import_hook(nn):
    # The hook stays, so it is for a file that no other probe imports.
    with written(nn, name="checked_networks"):
        beartype_package("checked_networks")
        import checked_networks as users

        net = users.Net(users.Wide(4, 4), None, 1)
        return (
            net(torch.ones(1, 4)),
            _refusal(users.Block, "4"),
            _refusal(users.Net, 3),
            _refusal(net, 3),
        )
