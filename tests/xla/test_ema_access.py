from typing import Any

import pytest
import torch

import modkit
from tests.xla.recipes import (
    agree,
    counted,
    end_step,
    frozen_network,
    inputs,
    network,
    on_host,
    train,
)


pytestmark = pytest.mark.xla


def trained(place: Any, steps: int = 4, **options: Any) -> tuple[Any, "modkit.EMA[Any]"]:
    """Return a network in evaluation mode, and its average after some steps."""
    net = network(place)
    ema = modkit.EMA(net, **{"decay": 0.9, **options})
    train(net, ema.update, 0, steps)
    return net.eval(), ema


def test_a_swap_reads_and_copies_nothing(device: torch.device) -> None:
    """Entering and leaving `applied()` causes neither a host read nor a compilation."""
    net, ema = trained(device)
    end_step()
    with counted() as counts:
        for _ in range(3):
            with ema.applied():
                pass
            end_step()

    assert (counts.compilations, counts.reads) == (0, 0)
    assert net[0].weight.is_xla


@pytest.mark.parametrize("options", [{}, {"precision": "fp64"}, {"device": "cpu"}], ids=str)
def test_evaluation_inside_applied(options: dict[str, Any], device: torch.device) -> None:
    """The block sees the average, the training weights are restored, and training goes on."""

    def scenario(place: torch.device) -> object:
        net, ema = trained(place, **options)
        before = on_host(net.state_dict())
        with ema.applied():
            averaged = on_host(net(inputs(place)))
        same = all(
            torch.equal(before[name], on_host(one)) for name, one in net.state_dict().items()
        )
        net.train()
        train(net, ema.update, 4, 7)
        return averaged, same, dict(ema.named_averages()), net.state_dict()

    agree(scenario, device)


@pytest.mark.parametrize("index", [0, 1])
def test_batch_normalization(index: int, device: torch.device) -> None:
    """`update_bn()` computes the statistics that torch does for a copy, from batches of either device."""
    net, ema = trained(device, decay=[0.5, 0.99])
    before = on_host(net.state_dict())
    loader = [inputs("cpu", seed) for seed in range(3)]
    twin = ema.averaged_model(index)
    torch.optim.swa_utils.update_bn(loader, twin, device)
    end_step()
    found = []
    for batches, place in ((loader, device), ([one.to(device) for one in loader], None)):
        ema.update_bn(batches, place, index=index)
        with ema.applied(index=index):
            found += [net.state_dict()["1.running_var"].cpu(), on_host(net(inputs(device)))]

    twin.eval()
    expected = [twin[1].running_var.cpu(), on_host(twin(inputs(device)))]
    torch.testing.assert_close(found, expected * 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(on_host(net.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_an_optimizer(optimizer: Any, device: torch.device) -> None:
    """After `attach()` each step of the optimizer is an update that reads and compiles nothing."""

    def steps(net: Any, stepper: Any, first: int, last: int) -> None:
        for step in range(first, last):
            stepper.zero_grad()
            net(inputs(net[0].weight.device, step)).square().mean().backward()
            stepper.step()
            end_step()

    def run(place: torch.device) -> tuple[Any, Any, "modkit.EMA[Any]"]:
        # No batch normalization: behind it the gradients of biases are rounding errors.
        net = frozen_network(place).requires_grad_()
        # AdamW counts its steps in a tensor on the device, which no update reads.
        stepper = optimizer(net.parameters(), lr=0.01)
        return net, stepper, modkit.EMA(net, decay=0.9).attach(stepper)

    def scenario(place: torch.device) -> object:
        net, stepper, ema = run(place)
        steps(net, stepper, 0, 6)
        return dict(ema.named_averages()), ema.n_averaged

    def reads(*, averaged: bool) -> tuple[int, int]:
        net, stepper, ema = run(device)
        if not averaged:
            ema.detach()
        steps(net, stepper, 0, 6)
        with counted() as counts:
            steps(net, stepper, 6, 12)
        return counts.compilations, counts.reads

    agree(scenario, device, rtol=1e-4, atol=1e-5)
    assert reads(averaged=True) == reads(averaged=False)
