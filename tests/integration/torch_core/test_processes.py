import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tests.helpers import Implementation, freeze
from tests.integration.networks import PICKLABLE, make_batch
from tests.processes import context


def train_elsewhere(net: torch.nn.Module, batch: Tensor, results: Any) -> None:
    """Run in a process of its own: take a step in place on shared memory, and answer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = net(batch).square().mean()
    loss.backward()
    optimizer.step()
    results.put((type(net).__name__, all(p.is_shared() for p in net.parameters()), loss.item()))


def test_another_process_trains_shared_weights(impl: Implementation) -> None:
    """A network in shared memory is sent to another process, whose step is seen here."""
    net, batch = PICKLABLE[impl.name]().share_memory(), make_batch("free")
    reference = copy.deepcopy(net)
    start = context()
    results = start.Queue()
    process = start.Process(target=train_elsewhere, args=(net, batch, results))
    process.start()
    name, shared, loss = results.get(timeout=120)
    process.join()
    train_elsewhere(reference, batch, results)

    assert process.exitcode == 0
    assert name == type(net).__name__
    assert shared
    assert loss == results.get(timeout=120)[2]
    assert freeze(dict(net.state_dict())) == freeze(dict(reference.state_dict()))


def test_threads_call_one_network(impl: Implementation) -> None:
    """Several threads call the same network, each with its own gradient mode."""
    net, batch = PICKLABLE[impl.name]().eval(), make_batch("free")

    def call(index: int) -> tuple[bool, Tensor]:
        with torch.set_grad_enabled(index % 2 == 0):
            output = net(batch * (index + 1))
        return output.requires_grad, output.detach()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(16)))

    assert [flag for flag, _ in results] == [True, False] * 8
    for index, (_, output) in enumerate(results):
        assert torch.equal(output, net(batch * (index + 1)).detach())
