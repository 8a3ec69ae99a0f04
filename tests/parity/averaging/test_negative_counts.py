"""Updates below a count of zero, by which training loops delay an average."""

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import normed_net, one_weight, set_weight
from tests.parity.averaging.rules import RULES, states_after_updates
from tests.unit.averaging.recipes import as_accelerator


@for_each("rule", RULES)
@for_each("on_device", [False, True])
def test_a_negative_count_skips_updates(
    rule: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average stays until the count is zero, then it copies and goes on, with the bits of torch."""
    if on_device:
        as_accelerator(monkeypatch)

    def scenario(impl: Implementation):
        model = normed_net(impl)
        averaged = impl.AveragedModel(model, **RULES[rule](impl))
        averaged.n_averaged.fill_(-2)
        return states_after_updates(averaged, model, 5)

    assert same(scenario)[0] == "returned"


def test_buffers_are_copied_below_zero(impl: Implementation) -> None:
    """Buffers that are copied follow the model while the parameters wait."""
    model = impl.nn.BatchNorm1d(1)
    averaged = impl.AveragedModel(model)
    averaged.n_averaged.fill_(-1)
    model.running_mean.fill_(3.0)
    averaged.update_parameters(set_weight(model, 5.0))

    assert averaged.module.running_mean.item() == 3.0
    assert averaged.module.weight.item() == 1.0
    assert averaged.n_averaged.item() == 0


def test_functions_are_not_called_below_one(impl: Implementation) -> None:
    """A function is called for the first time when one model has been averaged."""
    counts = []
    model = one_weight(impl)
    averaged = impl.AveragedModel(model, avg_fn=lambda a, c, n: counts.append(int(n)) or a)
    averaged.n_averaged.fill_(-2)
    for _ in range(5):
        averaged.update_parameters(model)

    assert counts == [1, 2]


@for_each("rule", [rule for rule in RULES if "own" not in rule])
def test_a_compiled_update_skips_too(impl: Implementation, rule: str) -> None:
    """The compiled update looks at the count as the eager one does."""
    torch._dynamo.reset()
    model = one_weight(impl, 1.0)
    averaged, eager = (impl.AveragedModel(model, **RULES[rule](impl)) for _ in range(2))
    for each in averaged, eager:
        each.n_averaged.fill_(-2)
    update = torch.compile(averaged.update_parameters, backend="eager")
    found, expected = [], []
    for value in 2.0, float("nan"), 4.0, 5.0:
        update(set_weight(model, value))
        eager.update_parameters(model)
        found.append(averaged.module.weight.item())
        expected.append(eager.module.weight.item())
    torch._dynamo.reset()

    assert found[:3] == expected[:3] == [1.0, 1.0, 4.0]
    assert found[3] == pytest.approx(expected[3])
    assert averaged.n_averaged.item() == 2
