"""Measurements that the tests of distributed networks compare."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import run
from tests.distributed.modules.modes import MODES
from tests.distributed.modules.tasks import TASKS
from tests.distributed.modules.training import MARK, STEPS, Case, compare


# For each process: what torch and modkit have come to.
Found = list[dict[Case, dict[str, dict[str, Any]]]]

# Modules that torch refuses or does not know, and a part of its message.
REFUSED: dict[Case, str] = {
    **{(task, "ddp unused not found"): "find_unused_parameters=True" for task in TASKS},
    ("layers", "ddp synchronized norms"): "SyncBatchNorm layers only work with GPU modules",
    # The statistics of BatchNorm are buffers, and stay in 32 bits.
    ("layers", "fsdp bf16"): "expected scalar type BFloat16 but found Float",
}


def train_all(which: list[Case], folder: Path, ranks: int = 2, limit: float = 250.0) -> Found:
    """Train each case on torch and on modkit, all in the same processes."""
    return run(ranks, compare, which, mark_of(folder), folder=folder, limit=limit, timeout=60.0)


def mark_of(folder: Path) -> str:
    """Return what marks the processes that have been started by those of a folder."""
    return f"{os.getpid()}-{folder.name}"


def started_by(folder: Path) -> list[int]:
    """Return the numbers of such processes that are there."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        # The process may have ended, or its number may belong to another process.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark_of(folder)}".encode() in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return found


def assert_same(found: Found, case: Case) -> None:
    """Assert that torch and modkit came to the same, bit by bit, in each process."""
    for by_case in found:
        theirs, ours = by_case[case]["torch"], by_case[case]["modkit"]
        for result in theirs, ours:
            trace = result.pop("where", "")
            assert "raised" not in result or case in REFUSED, trace
        assert theirs == ours
        if case in REFUSED:
            assert REFUSED[case] in theirs["raised"][1]
        else:
            assert len(ours["losses"]) == STEPS
            assert all(map(math.isfinite, ours["losses"]))


def assert_is_the_whole(found: Found, case: Case) -> None:
    """Assert that the mean loss of all processes is that of one with the whole batch."""
    task, mode = case
    assert TASKS[task].rows_are_independent
    losses = [by_case[case]["modkit"]["losses"] for by_case in found]
    if MODES[mode].same_data:
        assert all(one == losses[0] for one in losses)
    else:
        assert losses[0] != losses[1]
    if not _is_the_whole(found, case, "torch"):
        pytest.skip("this torch does not give the losses of one process")
    assert _is_the_whole(found, case, "modkit")


def _is_the_whole(found: Found, case: Case, side: str) -> bool:
    task, mode = case
    alone = found[0][task, "alone"][side]["losses"]
    losses = [by_case[case][side]["losses"] for by_case in found]
    # Sums are rounded elsewhere, and after that the weights are others.
    rough = 0.05 if "bf16" in mode else 2e-3
    means = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    return all(
        math.isclose(mean, one, rel_tol=rough) for mean, one in zip(means, alone, strict=True)
    )
