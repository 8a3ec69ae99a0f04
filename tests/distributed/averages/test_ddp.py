from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import modkit
from modkit.optim.swa_utils import AveragedModel
from tests.distributed.averages.networks import averages_of, counted, differing, network, sgd
from tests.distributed.launcher import run


def batch_of(number: int) -> Tensor:
    """Return a batch of which each process has another one."""
    seed = 10 * number + torch.distributed.get_rank()
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))


def take_step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step on two batches, the first of which is not exchanged."""
    optimizer.zero_grad()
    assert isinstance(net, DistributedDataParallel)
    with net.no_sync():
        net(batch_of(2 * number)).square().mean().backward()
    net(batch_of(2 * number + 1)).square().mean().backward()
    optimizer.step()


def average() -> dict[str, Any]:
    """Average a model under its wrapper, the model itself, and a plain one with its weights."""
    net, plain = network(norm=nn.LayerNorm), network(norm=nn.LayerNorm)
    wrapped = DistributedDataParallel(net)
    optimizer = sgd(wrapped)
    outer: modkit.EMA[Any] = modkit.EMA(wrapped, decay=[0.5, 0.9]).attach(optimizer)
    inner: modkit.EMA[Any] = modkit.EMA(net, decay=[0.5, 0.9]).attach(optimizer)
    reference: modkit.EMA[Any] = modkit.EMA(plain, decay=[0.5, 0.9])
    copied, plain_copy = AveragedModel(wrapped), torch.optim.swa_utils.AveragedModel(plain)
    for number in range(4):
        take_step(wrapped, optimizer, number)
        copied.update_parameters(wrapped)
        plain.load_state_dict(net.state_dict())
        reference.update()
        plain_copy.update_parameters(plain)
    batch = torch.ones(2, 5)
    raw = wrapped(batch).detach()
    with inner.applied(wrapped, index=1):
        through_wrapper = wrapped(batch).detach()
    with outer.applied(index=1):
        inside = net(batch).detach()
    with reference.applied(index=1):
        expected = plain(batch).detach()
    fresh: modkit.EMA[Any] = modkit.EMA(net, decay=[0.5, 0.9])
    fresh.load_state_dict(outer.state_dict())
    outer.detach()
    return {
        "outer": differing(outer.state_dict(), reference.state_dict()),
        "inner": differing(inner.state_dict(), reference.state_dict()),
        "loaded": differing(fresh.state_dict(), reference.state_dict()),
        "copied": differing(
            dict(copied.module.module.state_dict()),  # type: ignore[operator]
            dict(plain_copy.module.state_dict()),
        ),
        "names": list(averages_of(outer)),
        "outputs": differing(
            [through_wrapper, inside, wrapped(batch).detach()], [expected] * 2 + [raw]
        ),
        "apart": not torch.equal(raw, inside),
        "costs": (counted(outer.update), counted(lambda: copied.update_parameters(wrapped))),
        "steps": (outer.n_averaged, inner.n_averaged),
        "averages": [averages_of(inner, index) for index in (0, 1)],
    }


def test_the_wrapper_makes_no_difference(tmp_path: Path) -> None:
    """Averages are those of the plain model on all ranks, once per step, without communication."""
    results = run(2, average, folder=tmp_path)

    assert differing(results[0]["averages"], results[1]["averages"]) == []
    for found in results:
        assert found["outer"] == found["inner"] == found["loaded"] == found["copied"] == []
        assert found["names"] == list(network(norm=nn.LayerNorm).state_dict())
        assert found["outputs"] == []
        assert found["apart"]
        assert found["costs"] == ((0, 0), (0, 0))
        # The counting took two more.
        assert found["steps"] == (6, 4)
