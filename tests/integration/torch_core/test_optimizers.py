import copy
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything
from tests.integration.networks import NETWORKS, agree, make_batch, make_net


OPTIMIZERS: Final = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
)
# Options without which an optimizer keeps little state, so that the comparison sees all of it.
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "LBFGS": {"max_iter": 3, "line_search_fn": "strong_wolfe"},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
}


def sparse_net(nn: ModuleType) -> torch.nn.Module:
    """Build a network all of whose gradients are sparse."""
    seed_everything()
    return nn.EmbeddingBag(11, 3, mode="sum", sparse=True)


def trainee(name: str, nn: ModuleType) -> tuple[torch.nn.Module, list[Tensor], Tensor]:
    """Build a network that the named optimizer can train, the parameters it takes, and a batch."""
    if name == "SparseAdam":
        net = sparse_net(nn)
        return net, list(net.parameters()), make_batch("lstm")
    net = make_net(nn, "free")
    parameters = [p for p in net.parameters() if name != "Muon" or p.ndim == 2]
    return net, parameters, make_batch("free")


def train(net: torch.nn.Module, optimizer: Optimizer, batch: Tensor, steps: int) -> list[Tensor]:
    """Take some steps towards class 0 and return the loss of each."""
    target = torch.zeros(len(batch), dtype=torch.long)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(batch), target)
        loss.backward()
        return loss

    return [torch.as_tensor(optimizer.step(closure)).detach() for _ in range(steps)]


def make_optimizer(name: str, parameters: Iterable[Tensor], **options: Any) -> Optimizer:
    """Build the named optimizer with the options under test."""
    return getattr(torch.optim, name)(parameters, **{**OPTIONS.get(name, {}), **options})


@for_each("name", OPTIMIZERS)
def test_five_steps_are_equal(name: str) -> None:
    """Losses, weights, buffers and the optimizer's state are bitwise identical to torch's."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], Any, Any]:
        net, parameters, batch = trainee(name, impl.nn)
        optimizer = make_optimizer(name, parameters)
        losses = train(net, optimizer, batch, 5)
        return losses, dict(net.state_dict()), optimizer.state_dict()

    losses, _, _ = agree(scenario)

    assert len({loss.item() for loss in losses}) == 5


@for_each(("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=str)
@for_each("name", OPTIMIZERS)
def test_state_transfers(name: str, source: Implementation, target: Implementation) -> None:
    """Training goes on from the other library's checkpoint as if it had never changed."""
    net, parameters, batch = trainee(name, source.nn)
    optimizer = make_optimizer(name, parameters)
    train(net, optimizer, batch, 3)
    successor, parameters, _ = trainee(name, target.nn)
    heir = make_optimizer(name, parameters)
    successor.load_state_dict(net.state_dict())
    heir.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert freeze(train(successor, heir, batch, 2)) == freeze(train(net, optimizer, batch, 2))
    assert freeze(dict(successor.state_dict())) == freeze(dict(net.state_dict()))


@for_each("network", NETWORKS)
def test_every_network_trains(network: str) -> None:
    """Each network goes through a loop with Adam, gradient clipping and a schedule."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], Any]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        optimizer = torch.optim.Adam(net.named_parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            losses.append(impl.nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            losses.append(loss.detach())
            optimizer.step()
            schedule.step()
        return losses, [dict(net.state_dict()), optimizer.state_dict()]

    losses, _ = agree(scenario)

    assert losses[-1] < losses[1]


def test_names_reach_the_optimizer(impl: Implementation) -> None:
    """An optimizer that is given named parameters keeps the names of the module's members."""
    net = make_net(impl.nn, "free")

    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)

    assert optimizer.state_dict()["param_groups"][0]["param_names"] == list(
        dict(net.named_parameters())
    )
