from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import run
from tests.helpers import MODKIT, TORCH, Implementation
from tests.models import one_weight, set_weight
from tests.parity.averaging.rules import RULES
from tests.unit.averaging.recipes import as_accelerator


IMPLEMENTATIONS = {impl.name: impl for impl in (TORCH, MODKIT)}


def broadcast_state(averaged: Any) -> None:
    """Broadcast the state of rank 0, as a resumed run does before training."""
    for tensor in averaged.state_dict().values():
        dist.broadcast(tensor, 0)


def broadcast_members(averaged: Any) -> None:
    """Broadcast parameters and buffers of rank 0, as DistributedDataParallel does."""
    for tensor in (*averaged.parameters(), *averaged.buffers()):
        dist.broadcast(tensor.data, 0)


def broadcast_buffers(averaged: Any) -> None:
    """Broadcast only the buffers, the count among them, not through ``.data``."""
    for buffer in averaged.buffers():
        dist.broadcast(buffer, 0)


def sum_counts(averaged: Any) -> None:
    """Sum the counts of all ranks; rank 1 has counted nothing."""
    if dist.get_rank() == 1:
        averaged.n_averaged.zero_()
    dist.all_reduce(averaged.n_averaged)
    dist.broadcast(averaged.module.weight.data, 0)


EXCHANGES = {
    "state": broadcast_state,
    "members": broadcast_members,
    "buffers": broadcast_buffers,
    "sum": sum_counts,
}


def update_after_an_exchange(
    name: str, exchange: str, rule: str, on_device: bool = False
) -> list[float]:
    """Average the weights 1 and 2 around a collective; rank 0 alone has loaded a count of 99.

    With ``on_device``, modkit treats the CPU as an accelerator, where reading the count is a host sync.
    """
    if on_device:
        with pytest.MonkeyPatch.context() as patch:
            as_accelerator(patch)
            return update_after_an_exchange(name, exchange, rule)
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


AGREEING = [
    *(("torch", exchange, "default", False) for exchange in EXCHANGES),
    *(("modkit", exchange, "default", False) for exchange in EXCHANGES),
    # On accelerators a collective leaves no trace on the host, and the device sees what it wrote.
    *(("modkit", exchange, "default", True) for exchange in EXCHANGES),
]
FUNCTIONS = ("avg_fn own", "multi_avg_fn own", "multi_avg_fn swa")


def update_all() -> dict[tuple[str, str, str, bool], list[float]]:
    """Run on each of two ranks."""
    rules = [(name, "state", rule, False) for rule in FUNCTIONS for name in IMPLEMENTATIONS]
    return {case: update_after_an_exchange(*case) for case in [*AGREEING, *rules]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of all cases on two ranks."""
    return run(2, update_all, folder=tmp_path_factory.mktemp("counts"))


@pytest.mark.parametrize("case", AGREEING, ids=str)
def test_ranks_agree_after_a_collective(found: list[Any], case: Any) -> None:
    """A count that came from another rank weighs the next updates alike on both ranks."""
    first, second, count = found[0][case]

    assert found[1][case] == [first, second, count]
    assert first == pytest.approx(1.01)
    assert second == pytest.approx(1.01 + 1.99 / 101)
    assert count == 101


@pytest.mark.parametrize("rule", FUNCTIONS)
def test_functions_get_the_count_of_a_collective(found: list[Any], rule: str) -> None:
    """Averaging functions are called with the broadcast count on both ranks, as in torch."""
    ours = [result["modkit", "state", rule, False] for result in found]

    assert ours == [result["torch", "state", rule, False] for result in found]
    assert ours[0] == ours[1]
