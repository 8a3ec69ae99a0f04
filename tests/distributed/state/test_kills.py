import signal

import pytest
import torch

from tests.distributed.launcher import launch, run
from tests.distributed.state.kills import load_both, save_twice
from tests.distributed.state.test_checkpoints import assert_equal


TIMEOUT = 4.0


def save_and_lose(folder, when, fate="die", ranks=2, *, later=False):
    """Save on some processes, of which one does not survive; return what became of them."""
    return launch(
        ranks,
        save_twice,
        folder,
        when,
        fate,
        later,
        folder=folder / "saving",
        timeout=TIMEOUT,
        # A survivor is not killed before it has had the time to see that it is alone.
        grace=4 * TIMEOUT if fate == "die" else TIMEOUT,
    )


def assert_the_first_is_whole(folder, ranks) -> None:
    """Assert that the first checkpoint loads as it was saved, and that the second is incomplete."""
    assert not (folder / "2" / ".metadata").exists()

    expected = torch.load(folder / "whole.pt")
    for found, error in run(ranks, load_both, folder, folder=folder / f"loading-{ranks}"):
        assert expected["step"] == 1
        for one in found:
            assert_equal(one, expected)
        assert ".metadata" in error


def test_a_process_is_killed_before_the_checkpoint_is_complete(tmp_path) -> None:
    """The one before it loads whole, and the survivor ends in an error."""
    killed, survivor = 1, 0
    outcomes = save_and_lose(tmp_path, "written")

    assert outcomes[killed].code == -signal.SIGKILL
    assert outcomes[survivor].code == 1
    assert "Error" in outcomes[survivor].error
    assert list((tmp_path / "2").glob("*.distcp"))
    assert_the_first_is_whole(tmp_path, ranks=2)


@pytest.mark.distributed
@pytest.mark.parametrize("later", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize(("when", "killed"), [("written", 2), ("index", 0)])
def test_one_of_three_is_killed(tmp_path, when, killed, later) -> None:
    """Whichever rank is killed, at any time: the survivors end in an error, and one rank loads."""
    outcomes = save_and_lose(tmp_path, when, ranks=3, later=later)

    assert outcomes[killed].code == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.rank == killed or (outcome.code == 1 and "Error" in outcome.error)
    assert_the_first_is_whole(tmp_path, ranks=1)


@pytest.mark.distributed
def test_one_of_two_stalls(tmp_path) -> None:
    """The other one ends in the timeout of its group, by itself and not in silence."""
    outcomes = save_and_lose(tmp_path, "written", fate="stall")

    assert outcomes[0].code == 1
    assert "imed out" in outcomes[0].error
    assert outcomes[1].code == -signal.SIGKILL
    assert_the_first_is_whole(tmp_path, ranks=2)
