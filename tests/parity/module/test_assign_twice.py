import torch

from tests.helpers import Implementation


def test_assign_leaves_nothing_behind_in_the_state_dict(impl: Implementation) -> None:
    """After a load with ``assign=True`` the same state dict loads by copying again."""
    state = impl.nn.Linear(2, 2).state_dict()
    before = {name: dict(entry) for name, entry in state._metadata.items()}
    impl.nn.Linear(2, 2).load_state_dict(state, assign=True)
    copied_into = impl.nn.Linear(2, 2)
    weight = copied_into.weight
    copied_into.load_state_dict(state)

    assert state._metadata == before
    assert copied_into.weight is weight
    assert torch.equal(weight, state["weight"])
