"""Declared migrations against the conversions of the libraries: bitwise the same, and back again."""

import copy

import pytest
import torch

import modkit
from tests.integration.migrations.library_cases import CASES
from tests.unit.migrations.networks import equal
from tests.unit.migrations.test_real_cases import test_back, test_up  # noqa: F401 - they run here, too


@pytest.fixture(params=CASES, scope="module", ids=lambda case: case.__name__)
def case(request):
    """Return a migration with what the library's own code makes of it, or skip."""
    return request.param()


@pytest.mark.parametrize(
    "load", [torch.nn.Module.load_state_dict, modkit.load_state_dict], ids=["torch", "modkit"]
)
def test_load(case, load):
    """After a load of the old file, the model holds what the library's model holds after its own."""
    expected = case.expected if case.loaded is None else case.loaded

    for given in (case.old, dict(case.old)):
        model = copy.deepcopy(case.model)
        load(model, given)

        assert equal(model.state_dict(), expected)
