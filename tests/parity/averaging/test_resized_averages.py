"""Averages whose storage is resized, freed and allocated again, as offloading does."""

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.averaging.rules import RULES, training_states


def layers(impl: Implementation, count: int) -> torch.nn.Module:
    """Build layers of one shape."""
    return impl.nn.Sequential(*(impl.nn.Linear(2, 2) for _ in range(count)))


def free_and_allocate(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor, and bring its values back in other memory."""
    values = tensor.detach().clone()
    storage = tensor.untyped_storage()
    storage.resize_(0)
    storage.resize_(values.nbytes)
    tensor.data.copy_(values)


RESIZES = {
    "larger": lambda tensor: tensor.data.resize_(5, 5),
    "storage": lambda tensor: tensor.untyped_storage().resize_(400),
    "freed": free_and_allocate,
}
OWN_FUNCTIONS = [rule for rule in RULES if rule.startswith("avg_fn") or "own" in rule]


def states(
    impl: Implementation,
    count: int,
    rule: str,
    resize: str,
    prepare: Any = lambda averaged: averaged,
) -> list[dict[str, torch.Tensor]]:
    """Update, resize the memory of two averages, and update again."""
    model = layers(impl, count)
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    found = []
    for step in training_states(model, 5):
        if step == 2:
            averaged = prepare(averaged)
            for tensor in averaged.module[1].parameters():
                RESIZES[resize](tensor)
        averaged.update_parameters(model)
        found.append({name: one.clone() for name, one in averaged.state_dict().items()})
    return found


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in OWN_FUNCTIONS])
def test_the_storage_of_an_average_can_be_resized(
    impl: Implementation, rule: str, resize: str
) -> None:
    """Each average has memory of its own, which can be resized like that of any tensor."""
    assert len(states(impl, 6, rule, resize)) == 5


@for_each("resize", RESIZES)
@for_each("count", [2, 6])
@for_each("rule", RULES)
def test_averages_with_memory_of_their_own_can_be_resized(
    rule: str, count: int, resize: str
) -> None:
    """Fewer than four alike, and those of other functions, are resized and go on with torch's bits."""
    if count == 6 and rule not in OWN_FUNCTIONS:
        pytest.skip("they share memory")
    found = same(lambda impl: states(impl, count, rule, resize))

    assert found[0] == "returned"


def clone_data(averaged: Any) -> Any:
    """Give each average other memory."""
    for parameter in averaged.parameters():
        parameter.data = parameter.data.clone()
    return averaged


PREPARATIONS = {
    "data": clone_data,
    "_apply": lambda averaged: averaged._apply(torch.clone),
    "deepcopy": copy.deepcopy,
    "pickle": lambda averaged: pickle.loads(pickle.dumps(averaged)),
}


@for_each("resize", RESIZES)
@for_each("way", PREPARATIONS)
def test_averages_that_were_given_other_memory_can_be_resized(way: str, resize: str) -> None:
    """An assignment to `data` ends the sharing, and copies never share."""
    found = same(lambda impl: states(impl, 6, "default", resize, PREPARATIONS[way]))

    assert found[0] == "returned"
