import pytest
import torch

from tests.helpers import MODKIT, Implementation


def layer(impl: Implementation) -> torch.nn.Module:
    """Make a layer without data."""
    return impl.own.Linear(1, 1, bias=False, device="meta")


def chain(impl: Implementation, depth: int) -> torch.nn.Module:
    """Nest that many blocks, each of them a layer and the next block."""
    block = layer(impl)
    for _ in range(depth - 1):
        block = impl.own.Sequential(layer(impl), block)
    return block


# A mixture of experts with 671 billion parameters has about 40,000 modules.
@pytest.mark.parametrize("modules", [4_000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_thousands_of_modules_load_walk_and_convert(modules):
    """Every operation runs on every module: on layers side by side, and on chains of 800 blocks."""
    wide = MODKIT.own.ModuleList(layer(MODKIT) for _ in range(modules // 2))
    deep = MODKIT.own.ModuleList(chain(MODKIT, 800) for _ in range(modules // 3200))
    model = MODKIT.own.ModuleList([wide, deep])
    state = model.state_dict()

    model.half()
    model.eval()
    keys = model.load_state_dict(state)
    converted = {p.dtype for p in model.parameters()}
    model.load_state_dict(state, assign=True)

    members = list(model.modules())
    parameters = dict(model.named_parameters())
    assert modules * 0.89 < len(members) <= modules + 3
    assert list(parameters) == list(state)
    assert len(parameters) == sum(isinstance(m, torch.nn.Linear) for m in members)
    assert ([], []) == (keys.missing_keys, keys.unexpected_keys)
    assert converted == {torch.float16}
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert not any(m.training for m in members)
