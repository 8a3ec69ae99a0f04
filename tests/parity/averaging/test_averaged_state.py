import io

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, freeze, same
from tests.models import one_weight
from tests.parity.averaging.rules import (
    RULES,
    averaged_of,
    build,
    every_subject,
    through_file,
    through_pickle,
    training_states,
)


every_rule = for_each("rule", RULES)


def test_state_dict_is_that_of_torch() -> None:
    """Keys, their order, values and metadata equal torch's."""

    def scenario(impl: Implementation):
        state = averaged_of(impl, "sequential")[1].state_dict()
        return list(state), state, state._metadata

    assert same(scenario)[0] == "returned"


@every_rule
@every_subject
@for_each("assign", [False, True])
@pytest.mark.parametrize("source", [TORCH, MODKIT], ids=str)
@pytest.mark.parametrize("target", [TORCH, MODKIT], ids=str)
def test_average_continues_in_either_library(
    rule: str, subject: str, assign: bool, source, target
) -> None:
    """An average that either library loads from a file, by copy or assignment, goes on bit by bit."""
    torch.manual_seed(1)
    model, averaged = averaged_of(source, subject, 3, **RULES[rule](source))
    file = io.BytesIO()
    torch.save(averaged.state_dict(), file)
    file.seek(0)
    resumed = target.AveragedModel(build(target, subject), **RULES[rule](target))
    keys = resumed.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    for _ in training_states(model, 3):
        averaged.update_parameters(model)
        resumed.update_parameters(model)

    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert freeze(dict(resumed.state_dict())) == freeze(dict(averaged.state_dict()))
    assert resumed.n_averaged == 6


def test_state_that_does_not_fit_is_refused_as_in_torch() -> None:
    """Missing, unexpected and misshaped entries raise torch's error, which names them."""

    def scenario(change):
        def run(impl: Implementation):
            averaged = impl.AveragedModel(one_weight(impl))
            state = averaged.state_dict()
            change(state)
            averaged.load_state_dict(state)

        return run

    assert same(scenario(lambda state: state.pop("n_averaged")))[0] == "raised"
    assert same(scenario(lambda state: state.update(decay=torch.ones(1))))[0] == "raised"
    assert same(scenario(lambda s: s.update({"module.weight": torch.ones(2)})))[0] == "raised"
    assert same(lambda impl: impl.AveragedModel(one_weight(impl)).load_state_dict({"a": 1}))[0] == (
        "raised"
    )


@pytest.mark.parametrize("way", [through_pickle, through_file])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.endswith(("ema", "swa"))])
def test_averaged_model_with_a_function_of_the_library_can_be_pickled(impl, rule, way) -> None:
    """An average that was saved as a whole goes on with its rule, decay included."""
    model, averaged = averaged_of(impl, "sequential", **RULES[rule](impl))
    other = way(averaged)
    for _ in training_states(model, 2):
        averaged.update_parameters(model)
        other.update_parameters(model)

    assert freeze(dict(other.state_dict())) == freeze(dict(averaged.state_dict()))
