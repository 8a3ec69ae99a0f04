import copy

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import tensors
from tests.parity.averaging.rules import averaged_of, every_subject, training_states


CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


every_cast = for_each("method", CASTS)


@every_subject
@every_cast
@for_each("together", [False, True])
def test_a_cast_average_goes_on(subject: str, method: str, together: bool) -> None:
    """The average is cast, with its model or alone, and averaged further with torch's bits."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, subject)
        getattr(averaged, method)()
        if together:
            getattr(model, method)()
        for _ in training_states(model, 2):
            averaged.update_parameters(model)
        return averaged, list(tensors(averaged))

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("updates", [0, 2])
def test_a_count_that_type_has_cast_goes_on(updates: int) -> None:
    """After `type(torch.float64)` the count is a float64, with which torch averages further."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, "layer", updates)
        averaged.type(torch.float64)
        model.double()
        for _ in training_states(model, 3):
            averaged.update_parameters(model)
        return averaged, averaged.n_averaged

    assert same(scenario)[0] == "returned"


@every_subject
def test_an_average_on_meta_is_filled_by_to_empty_and_a_load(
    impl: Implementation, subject: str
) -> None:
    """A checkpoint is loaded into an average that was made without data, which then goes on."""
    model, averaged = averaged_of(impl, subject)
    empty = impl.AveragedModel(copy.deepcopy(model), "meta").to_empty(device="cpu")
    empty.load_state_dict(averaged.state_dict())
    for _ in training_states(model, 2):
        averaged.update_parameters(model)
        empty.update_parameters(model)

    assert freeze(empty) == freeze(averaged)
    assert empty.n_averaged == 4
