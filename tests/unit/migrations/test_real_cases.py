"""Eight migrations that libraries wrote by hand, declared: bitwise what their conversions return."""

import copy

import pytest
import torch

import modkit
from modkit import migrations as mig
from modkit.errors import MigrationError
from tests.unit.migrations.networks import equal
from tests.unit.migrations.real_cases import CASES


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def case(request):
    """Return a migration that a library wrote by hand."""
    return request.param()


def saved_anyway(model, expected):
    """Return what the model's state dict holds after a load of the expected entries."""
    reference = copy.deepcopy(model)
    reference.load_state_dict(expected)
    return reference.state_dict()


def test_up(case):
    """With versions and without, the result is that of the library's conversion; twice is once."""
    for given in (case.old, dict(case.old)):
        new = mig.migrate(case.model, given)

        assert equal(new, case.expected)
        assert equal(mig.migrate(case.model, new), case.expected)
        assert [name for name in case.model.state_dict() if name in new] == list(new)


def test_back(case):
    """The way back gives the old file, or is refused where a step loses something."""
    new = mig.migrate(case.model, case.old)
    to = dict.fromkeys(case.declared, 1)

    if case.lossy:
        with pytest.raises(MigrationError, match="has no inverse"):
            mig.migrate(case.model, new, to=to)
    else:
        assert equal(mig.migrate(case.model, new, to=to), case.old)
        assert equal(mig.migrate(case.model, dict(new), to=to), case.old)


@pytest.mark.parametrize(
    "load", [torch.nn.Module.load_state_dict, modkit.load_state_dict], ids=["torch", "modkit"]
)
def test_load(case, load):
    """Each loader takes the old file, with versions and without, and the migrated one."""
    expected = saved_anyway(case.model, mig.migrate(case.model, case.old))

    for given in (case.old, dict(case.old), mig.migrate(case.model, case.old)):
        model = copy.deepcopy(case.model)
        load(model, given)

        assert equal(model.state_dict(), expected)
