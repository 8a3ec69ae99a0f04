"""The count in the memory of an accelerator, where the host does not read it; on the CPU as one."""

import pytest
import torch

from modkit.optim import swa_utils
from tests.cases import for_each
from tests.helpers import MODKIT, Implementation
from tests.models import one_weight, set_weight
from tests.unit.averaging.recipes import CountCalls, as_accelerator


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modkit treat the CPU as a device on which reads are host syncs."""
    as_accelerator(monkeypatch)


def in_place(averages, currents, count) -> None:
    """Average by a rule whose weight is computed on the device."""
    for average, current in zip(averages, currents, strict=True):
        average.lerp_(current, 1 / (count + 1))


FUNCTIONS = {
    "avg_fn": {"avg_fn": lambda average, current, count: average + (current - average) / count},
    "multi_avg_fn": {"multi_avg_fn": in_place},
}


@for_each("kind", FUNCTIONS)
def test_functions_of_the_user_cause_no_host_sync(kind: str) -> None:
    """They get the count as a tensor, at least one, and the first update reads nothing either."""
    model = one_weight(MODKIT)
    averaged = swa_utils.AveragedModel(model, **FUNCTIONS[kind])
    with CountCalls("_local_scalar_dense") as reads:
        for value in 4.0, 8.0, 6.0:
            averaged.update_parameters(set_weight(model, value))

    assert reads.calls == []
    assert averaged.n_averaged == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_are_called_from_the_second_update_on(
    impl: Implementation, compiled: bool
) -> None:
    """A function is not called in an update that copies."""
    torch._dynamo.reset()
    calls = []

    def keep(average, current, count):
        calls.append(None)
        return average

    model = one_weight(impl)
    averaged = impl.AveragedModel(model, avg_fn=keep)
    update = averaged.update_parameters
    if compiled:
        update = torch.compile(update, backend="eager")
    update(model)
    update(model)
    torch._dynamo.reset()

    assert len(calls) == 1


def test_functions_get_a_count_of_at_least_one() -> None:
    """In the first update and below zero a function is called too, and its result is not used."""
    counts = []
    model = one_weight(MODKIT, 1.0)
    averaged = swa_utils.AveragedModel(
        model, avg_fn=lambda average, current, count: counts.append(int(count)) or average * 0
    )
    averaged.n_averaged.fill_(-1)
    found = []
    for value in 2.0, 3.0, 4.0, 5.0:
        averaged.update_parameters(set_weight(model, value))
        found.append(averaged.module.weight.item())

    assert found == [1.0, 3.0, 0.0, 0.0]
    assert counts == [1, 1, 1, 2]


def test_stochastic_rounding_reads_the_count_only_after_a_write() -> None:
    """The host counts the steps from there on, so that a seed does not cost a host sync."""
    model = one_weight(MODKIT, 1.0).bfloat16()
    averaged = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), precision="stochastic"
    )
    seen = []
    with CountCalls("_local_scalar_dense") as reads:
        for write in False, False, False, True, False:
            if write:
                averaged.n_averaged.fill_(7)
            averaged.update_parameters(model)
            seen.append(len(reads.calls))

    assert seen == [1, 1, 1, 2, 2]
    assert averaged.n_averaged == 9
