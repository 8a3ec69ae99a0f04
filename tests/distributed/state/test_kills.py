"""Processes that are killed, or stop, while a checkpoint is being written."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.distributed.launcher import launch, run
from tests.distributed.state.networks import steps, wholes
from tests.distributed.state.scenarios import load, trained
from tests.distributed.state.test_checkpoints import assert_equal
from tests.helpers import MODKIT, TORCH


TIMEOUT = 4.0


def die() -> None:
    """End this process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    """Do nothing for longer than the others wait."""
    time.sleep(60)


FATES = {"die": die, "stall": stall}


class Fatal(dcp.FileSystemWriter):
    """Writes files, and on one process comes to its fate before the checkpoint is complete.

    Args:
        path: Where to write.
        when: ``"written"``: after the process has written its files; ``"index"``: before the first
            process writes the index, which completes the checkpoint.
        fate: What happens then.
    """

    def __init__(self, path: Path, when: str, fate: str) -> None:
        super().__init__(path)
        self.when, self.fate = when, fate

    def write_data(self, *args: Any) -> Any:
        """Write the files of this process."""
        written = super().write_data(*args)
        written.wait()
        if self.when == "written" and dist.get_rank() == dist.get_world_size() - 1:
            FATES[self.fate]()
        return written

    def finish(self, **kwargs: Any) -> None:
        """Write the index, in the first process."""
        if self.when == "index":
            FATES[self.fate]()
        super().finish(**kwargs)


def save_twice(folder: Path, when: str, fate: str, later: bool) -> None:
    """Save, learn more, and save once more, which one rank does not survive."""
    model, optimizer = trained(MODKIT)
    group = dist.new_group()
    for number in (1, 2):
        modules, moments = get_state_dict(model, optimizer)
        state = {"model": modules, "optimizer": moments, "step": number}
        place = folder / str(number)
        if number == 1:
            dcp.save(state, checkpoint_id=place)
            whole = wholes(state)
            if dist.get_rank() == 0:
                torch.save(whole, folder / "whole.pt")
            dist.barrier()
        else:
            writer = Fatal(place, when, fate)
            save_fatally(state, writer, group if later else None)
        steps(model, optimizer, range(3, 6))


def save_fatally(state: dict[str, Any], writer: Fatal, group: Any) -> None:
    """Save at once, or, in a group of its own, later."""
    if group is None:
        dcp.save(state, storage_writer=writer)
    else:
        dcp.async_save(state, storage_writer=writer, process_group=group).result()


def load_both(folder: Path) -> Any:
    """Load the first checkpoint with both libraries, and see what the second one is."""
    found = [load(impl, folder / "1")[0] for impl in (TORCH, MODKIT)]
    try:
        load(MODKIT, folder / "2")
    except dcp.api.CheckpointException as error:
        return found, str(error)
    return found, ""


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
