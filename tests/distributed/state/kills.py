"""Processes that are killed, or stop, while a checkpoint is being written."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.distributed.state.networks import steps, wholes
from tests.distributed.state.scenarios import load, trained
from tests.helpers import MODKIT, TORCH


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
