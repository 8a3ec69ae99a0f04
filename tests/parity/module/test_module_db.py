import pytest
import torch

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


def kind_of(value):
    """Tell what a constructor argument means for the shape of what is built."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(kind_of(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, kind_of(item)) for key, item in value.items())
    is_plain = isinstance(value, (bool, int, float, str, torch.nn.Module, type(None)))
    return repr(value) if is_plain else type(value)


def one_of_a_kind(info):
    """Yield the cases of an entry, of its first dtype, whose constructors get different arguments."""
    kinds = set()
    for label, sample, dtype, training in cases(info, info.dtypes[:1]):
        kind = (kind_of(sample.args), kind_of(sample.kwargs))
        if kind not in kinds:
            kinds.add(kind)
            yield label, sample, dtype, training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@for_each("info", module_db, ids=lambda info: info.name)
def test_a_layer_is_as_in_torch(info, every):
    """State, text, outputs, gradients, statistics, warnings, copies and checkpoints are torch's."""
    differing = []
    for label, sample, dtype, training in cases(info) if every else one_of_a_kind(info):
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
