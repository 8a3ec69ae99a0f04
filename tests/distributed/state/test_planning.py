import pytest
import torch

from tests.distributed.launcher import run
from tests.distributed.state.planning import BATCH, WIDTH, formulas, measure, network, units


pytestmark = pytest.mark.distributed

PLANNED = formulas()


@pytest.fixture(scope="module", params=[1, 2, 3])
def measured(request, tmp_path_factory):
    """Measure on one, two and three processes."""
    folder = tmp_path_factory.mktemp("planning")
    return run(request.param, measure, folder=folder, limit=120.0)


def compare(found: dict[str, int], planned) -> None:
    """Assert that what was exchanged is what was planned."""
    assert found == {kind: number for kind, number in vars(planned).items() if number}


def test_each_process_holds_what_was_planned(measured) -> None:
    """Parameters, gradients, moments and averages of each precision have that many bytes."""
    for rank, found in enumerate(measured):
        shard = sum(unit.shard(len(measured), rank) for unit in units(network()))
        for (dtype, precision, averages), held in found["memory"].items():
            kind = getattr(torch, dtype.removeprefix("torch."))

            assert held == vars(PLANNED["memory"](shard, kind, precision, averages))


def test_no_process_holds_more_than_the_first(measured) -> None:
    """The formula for the first rank is that for the largest, and all shards are the whole."""
    parts = [units(network()), range(len(measured))]
    shards = [sum(unit.shard(len(measured), rank) for unit in parts[0]) for rank in parts[1]]

    assert max(shards) == shards[0]
    assert sum(shards) == sum(unit.numel for unit in parts[0])


def test_copies_hold_what_was_planned(measured) -> None:
    """Each process of DDP has all of it."""
    whole = sum(unit.numel for unit in units(network()))
    for found in measured:
        assert found["copies"] == vars(PLANNED["memory"](whole, averages=1))


def test_steps_exchange_what_was_planned(measured) -> None:
    """The collectives of FSDP2, DDP and tensor parallelism carry that many bytes."""
    ranks = len(measured)
    for found in measured:
        compare(found["ddp"], PLANNED["ddp"](units(network())))
        if ranks > 1:
            narrow = PLANNED["fsdp"](units(network()), ranks, param_dtype=torch.bfloat16)
            compare(found["fsdp"], PLANNED["fsdp"](units(network()), ranks))
            compare(found["fsdp bf16"], narrow)
            compare(found["tp"], PLANNED["tensor_parallel"](2, BATCH, WIDTH))


def test_updates_of_averages_exchange_nothing(measured) -> None:
    """The formulas hold for any world size and any number of averages."""
    assert [found["update"] for found in measured] == [{}] * len(measured)
