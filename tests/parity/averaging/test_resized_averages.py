"""Averages whose storage is resized, freed and allocated again, as offloading does."""

import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.averaging.rules import RULES, training_states


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


def states(impl: Implementation, rule: str, resize: str) -> list[dict[str, torch.Tensor]]:
    """Update, resize the memory of two averages, and update again."""
    model = impl.nn.Sequential(*(impl.nn.Linear(2, 2) for _ in range(6)))
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    found = []
    for step in training_states(model, 5):
        if step == 2:
            for tensor in averaged.module[1].parameters():
                RESIZES[resize](tensor)
        averaged.update_parameters(model)
        found.append({name: one.clone() for name, one in averaged.state_dict().items()})
    return found


@for_each("resize", RESIZES)
@for_each("rule", RULES)
def test_the_storage_of_an_average_can_be_resized(rule: str, resize: str) -> None:
    """Each average has memory of its own, which can be resized like that of any tensor."""
    assert same(lambda impl: states(impl, rule, resize))[0] == "returned"
