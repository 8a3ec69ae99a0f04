import copy
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

import pytest
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
KERNELS: Final = [
    (name, kernel)
    for name in ("Adagrad", "Adam", "AdamW", "SGD")
    for kernel in ({"fused": True}, {"foreach": True}, {"foreach": False})
]


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


def test_every_optimizer_is_covered() -> None:
    """The list is read from torch, and holds what every user expects of it."""
    newer = {"Muon"} & vars(torch.optim).keys()

    assert {"Adam", "LBFGS", "SGD", "SparseAdam"} | newer <= set(OPTIMIZERS)


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


@for_each(("name", "kernel"), KERNELS)
def test_kernel_choice_is_equal(name: str, kernel: dict[str, bool]) -> None:
    """Fused, foreach and plain steps read the parameters alike."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], Any]:
        net, parameters, batch = trainee(name, impl.nn)
        options = {} if name == "SGD" else {"lr": 0.01}
        optimizer = make_optimizer(name, parameters, **options, **kernel)
        return train(net, optimizer, batch, 3), dict(net.state_dict())

    agree(scenario)


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


def test_optimizer_in_backward() -> None:
    """One optimizer a parameter, stepped by a post-accumulate hook, trains like torch."""

    def scenario(impl: Implementation) -> dict[str, Tensor]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        before = freeze(dict(net.state_dict()))
        for _ in range(2):
            net(batch).square().mean().backward()

        assert all(parameter.grad is None for parameter in net.parameters())
        assert freeze(dict(net.state_dict())) != before

        return dict(net.state_dict())

    agree(scenario)


@pytest.mark.parametrize(
    "regroup",
    [
        lambda net: [{"params": net.inner.parameters()}, {"params": [net.w], "lr": 0.5}],
        lambda net: [{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1}],
    ],
    ids=["by_member", "by_rank"],
)
def test_parameter_groups(regroup: Callable[[torch.nn.Module], list[dict[str, Any]]]) -> None:
    """Groups picked by member or by rank train the chosen parameters and leave the others."""

    def scenario(impl: Implementation) -> dict[str, Tensor]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        train(net, torch.optim.SGD(regroup(net), lr=0.1), batch, 3)
        return dict(net.state_dict())

    trained = agree(scenario)

    assert torch.equal(trained["out.bias"], make_net(torch.nn, "free").state_dict()["out.bias"])
