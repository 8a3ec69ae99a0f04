import pytest

from tests.cases import for_each
from tests.distributed.modules.checks import assert_is_the_whole, assert_same, train_all
from tests.distributed.modules.training import cases


MODES = ("alone", "ddp", "fsdp", "tp")
CASES = [
    *cases(("classes",), (*MODES, "ddp accumulates", "fsdp bf16"), ranks=2),
    *cases(("layers",), ("ddp unused", "fsdp"), ranks=2),
    *cases(("held",), ("ddp static", "tp"), ranks=2),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Train all of them on two processes."""
    return train_all(CASES, tmp_path_factory.mktemp("short"))


@for_each("case", CASES, ids="-".join)
def test_losses_are_those_of_torch(found, case) -> None:
    """20 steps have equal losses, end in equal weights, and exchange as many bytes."""
    assert_same(found, case)


@for_each(
    "case", [case for case in CASES if case[0] == "classes" and case[1] != "alone"], ids="-".join
)
def test_losses_are_those_of_one_process(found, case) -> None:
    """The mean of the losses is that of a single process with the batches of all."""
    assert_is_the_whole(found, case)


def test_nothing_is_exchanged_but_what_the_mode_needs(found) -> None:
    """One rank does not communicate; copies reduce gradients, and shards are gathered and reduced."""
    talk = {mode: found[0]["classes", mode]["modkit"]["talk"] for mode in MODES}

    assert talk["alone"] == {}
    # The buffers, by type, and the gradients.
    assert talk["ddp"] == {"broadcast": 2, "all_reduce": 1}
    # The root once, each of two blocks twice; each of the three has gradients.
    assert talk["fsdp"] == {"all_gather": 5, "reduce_scatter": 3}
    # Once in the forward and once in the backward of each block.
    assert talk["tp"] == {"all_reduce": 4}
