import pytest

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.module.module_cases import (
    cases,
    copies,
    module_db,
    observe,
    ready,
    state_of,
)


MATCHED = "<All keys matched successfully>"


def some_cases(info):
    """Return the first and the last case of an entry, in training; the last has most arguments."""
    in_training = [case for case in cases(info, info.dtypes[:1]) if case[-1]]
    return in_training[:: max(1, len(in_training) - 1)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@for_each("info", module_db, ids=lambda info: info.name)
def test_a_layer_is_as_in_torch(info, every):
    """State, text, outputs, gradients, statistics, warnings, copies and checkpoints are torch's."""
    differing = []
    for label, sample, dtype, training in cases(info) if every else some_cases(info):
        expected = observe(sample, TORCH, dtype, training)
        actual = observe(sample, MODKIT, dtype, training)
        differing += [
            (label, aspect)
            for aspect in expected | actual
            if expected.get(aspect) != actual.get(aspect)
        ]

        theirs, ours = (ready(sample, impl, dtype, training) for impl in (TORCH, MODKIT))
        if copies(theirs) != copies(ours):
            differing.append((label, "copies"))
        for saved, target in ((theirs, MODKIT), (ours, TORCH)):
            loaded = sample.build(target, start=1).to(dtype)
            result = repr(loaded.load_state_dict(saved.state_dict(), strict=True))
            if result != MATCHED or state_of(loaded) != state_of(saved):
                differing.append((label, f"checkpoint for {target}"))

    assert differing == []
