import pickle

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.distributed.launcher import run
from tests.distributed.state.scenarios import load_all, save_all


pytestmark = pytest.mark.distributed

LIBRARIES = ("torch", "modkit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return where the checkpoints are."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    """Train and save on two processes."""
    return run(2, save_all, folder / "saved", folder=folder / "saving", limit=200.0)


@pytest.fixture(scope="module", params=[1, 2, 3])
def loaded(request, saved, folder):
    """Load on one, two and three processes."""
    ranks = request.param
    return run(ranks, load_all, folder / "saved", folder=folder / f"loading-{ranks}", limit=200.0)


def assert_equal(one, two) -> None:
    """Assert that two states have equal keys and bitwise identical values."""
    (ones, spec), (twos, other) = tree_flatten(one), tree_flatten(two)

    assert spec == other
    for left, right in zip(ones, twos, strict=True):
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
        else:
            assert left == right


@pytest.mark.parametrize("by", LIBRARIES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_any_number_of_processes_loads_a_checkpoint(saved, loaded, library, by) -> None:
    """Module, optimizer and numbers have the bits that were saved, and training goes on."""
    before, through = saved[0][by]
    for results in loaded:
        after, losses = results[library, by]

        assert_equal(after, before)
        # Each has the whole batch; gradients are added up in another order.
        assert losses == pytest.approx(through, rel=1e-4)


def test_both_save_the_same(saved, folder) -> None:
    """A checkpoint of modkit has torch's values and index, and training goes through the same losses."""
    for results in saved:
        assert_equal(results["modkit"][0], results["torch"][0])

        assert results["modkit"][1] == results["torch"][1]
    indexes = []
    for library in LIBRARIES:
        with (folder / "saved" / library / ".metadata").open("rb") as file:
            indexes.append(pickle.load(file))

    assert indexes[0].state_dict_metadata == indexes[1].state_dict_metadata
    assert indexes[0].planner_data == indexes[1].planner_data
    assert indexes[0].state_dict_metadata["model.body.0.weight"].size == torch.Size([8, 7])
