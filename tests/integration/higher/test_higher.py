import pytest
import torch

from tests.helpers import Implementation
from tests.integration.image_networks import images, scaled_net
from tests.integration.networks import agree


def test_inner_loop() -> None:
    """The inner loop trains a functional copy, and the outer gradient passes through it."""
    higher = pytest.importorskip("higher", reason="needs higher: nox -s ecosystem installs it")

    def scenario(impl: Implementation) -> object:
        net, x = scaled_net(impl.nn).eval(), images()
        before = [p.detach().clone() for p in net.parameters()]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (copied, inner):
            for _ in range(2):
                inner.step(copied(x).square().mean())
            loss = copied(x).square().mean()
            loss.backward()
        kept = all(map(torch.equal, before, net.parameters()))
        return kept, loss, [p.grad for p in net.parameters()], list(copied.parameters())

    kept, _, gradients, _ = agree(scenario)

    assert kept
    assert all(gradient is not None for gradient in gradients)
