from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import run
from tests.helpers import MODKIT, TORCH, Implementation
from tests.parity.averaging.networks import RULES, one_weight, set_weight


IMPLEMENTATIONS = {impl.name: impl for impl in (TORCH, MODKIT)}


def broadcast_state(averaged: Any) -> None:
    """Broadcast the state of rank 0, as a resumed run does before training."""
    for tensor in averaged.state_dict().values():
        dist.broadcast(tensor, 0)


def broadcast_members(averaged: Any) -> None:
    """Broadcast parameters and buffers of rank 0, as DistributedDataParallel does."""
    for tensor in (*averaged.parameters(), *averaged.buffers()):
        dist.broadcast(tensor.data, 0)


def sum_counts(averaged: Any) -> None:
    """Sum the counts of all ranks; rank 1 has counted nothing."""
    if dist.get_rank() == 1:
        averaged.n_averaged.zero_()
    dist.all_reduce(averaged.n_averaged)
    dist.broadcast(averaged.module.weight.data, 0)


EXCHANGES = {
    "state": broadcast_state,
    "members": broadcast_members,
    "sum": sum_counts,
}


def update_after_an_exchange(name: str, exchange: str, rule: str) -> list[float]:
    """Average the weights 1 and 2 around a collective; rank 0 alone has loaded a count of 99."""
    impl: Implementation = IMPLEMENTATIONS[name]
    model = one_weight(impl, 1.0)
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    averaged.update_parameters(model)
    if dist.get_rank() == 0:
        averaged.load_state_dict({**averaged.state_dict(), "n_averaged": torch.tensor(99)})
    EXCHANGES[exchange](averaged)
    averaged.update_parameters(set_weight(model, 2.0))
    first = averaged.module.weight.item()
    averaged.update_parameters(set_weight(model, 3.0))
    return [first, averaged.module.weight.item(), averaged.n_averaged.item()]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_agree_after_a_collective(
    impl: Implementation, exchange: str, tmp_path: Path
) -> None:
    """A count that came from another rank weighs the next updates alike on both ranks."""
    found = run(2, update_after_an_exchange, impl.name, exchange, "default", folder=tmp_path)

    assert found[0] == found[1]
    first, second, count = found[0]
    assert first == pytest.approx(1.01)
    assert second == pytest.approx(1.01 + 1.99 / 101)
    assert count == 101


@pytest.mark.distributed
@pytest.mark.parametrize("rule", ["avg_fn own", "multi_avg_fn own", "multi_avg_fn swa"])
def test_functions_get_the_count_of_a_collective(
    impl: Implementation, rule: str, tmp_path: Path
) -> None:
    """Averaging functions are called with the broadcast count on both ranks, as in torch."""
    found = run(2, update_after_an_exchange, impl.name, "state", rule, folder=tmp_path / "own")
    expected = run(2, update_after_an_exchange, "torch", "state", rule, folder=tmp_path / "torch")

    assert found == expected
    assert found[0] == found[1]
