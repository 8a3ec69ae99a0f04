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


every_info = for_each("info", module_db, ids=lambda info: info.name)


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
@every_info
def test_runs_as_torch(info, others):
    """Every case gives torch's state, repr, outputs, gradients, statistics and warnings."""
    differing = []
    # The first dtype of each entry, or all others.
    dtypes = info.dtypes[1:] if others else info.dtypes[:1]
    for label, sample, dtype, training in cases(info, dtypes):
        expected = observe(sample, TORCH, dtype, training)
        actual = observe(sample, MODKIT, dtype, training)
        differing += [
            (label, aspect)
            for aspect in expected | actual
            if expected.get(aspect) != actual.get(aspect)
        ]

    assert differing == []


def _kind(value):
    """Tell what a constructor argument means for the shape of what is built."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_kind(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _kind(item)) for key, item in value.items())
    is_plain = isinstance(value, (bool, int, float, str, torch.nn.Module, type(None)))
    return repr(value) if is_plain else type(value)


def _one_of_a_kind(info):
    """Yield the cases of an entry that build different modules."""
    kinds = set()
    for label, sample, dtype, training in cases(info):
        kind = (_kind(sample.args), _kind(sample.kwargs), dtype)
        if kind not in kinds:
            kinds.add(kind)
            yield label, sample, dtype, training


@pytest.mark.filterwarnings("ignore")
@every_info
def test_copies_as_torch(info):
    """Pickle and deepcopy give the same classes, repr, state and metadata as torch's."""
    differing = [
        label
        for label, sample, dtype, training in _one_of_a_kind(info)
        if copies(ready(sample, TORCH, dtype, training))
        != copies(ready(sample, MODKIT, dtype, training))
    ]

    assert differing == []


@pytest.mark.filterwarnings("ignore")
@for_each(("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=str)
@every_info
def test_checkpoints_load_across(info, source, target):
    """A checkpoint of either library loads strictly and bitwise identically into the other."""
    differing = []
    for label, sample, dtype, training in _one_of_a_kind(info):
        saved = ready(sample, source, dtype, training)
        loaded = sample.build(target, start=1).to(dtype)
        result = loaded.load_state_dict(saved.state_dict(), strict=True)
        if str(result) != "<All keys matched successfully>" or state_of(loaded) != state_of(saved):
            differing.append(label)

    assert differing == []
