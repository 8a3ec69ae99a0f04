import pytest
import torch

from tests.helpers import MODKIT


# A mixture of experts with 671 billion parameters has about 40,000 modules.
@pytest.mark.parametrize("count", [4_000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_thousands_of_modules_load_walk_and_convert(count):
    """Every operation runs on every one of thousands of layers."""
    layers = (MODKIT.own.Linear(1, 1, bias=False, device="meta") for _ in range(count))
    model = MODKIT.own.ModuleList(layers)
    state = model.state_dict()

    model.half()
    model.eval()
    keys = model.load_state_dict(state)
    converted = {p.dtype for p in model.parameters()}
    model.load_state_dict(state, assign=True)

    members = list(model.modules())
    parameters = dict(model.named_parameters())
    assert len(members) == count + 1
    assert list(parameters) == list(state) == [f"{index}.weight" for index in range(count)]
    assert ([], []) == (keys.missing_keys, keys.unexpected_keys)
    assert converted == {torch.float16}
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert not any(m.training for m in members)
