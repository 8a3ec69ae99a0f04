import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import RanksFailedError, launch, run


def total(start: float) -> tuple[int, float]:
    """Add up the numbers of all processes."""
    number = torch.tensor(start + dist.get_rank())
    dist.all_reduce(number)
    return os.getpid(), number.item()


def fail_on_one() -> None:
    """Raise in one process while the other one waits for it."""
    if dist.get_rank() == 1:
        message = "this one has had enough"
        raise ValueError(message)
    dist.barrier()


def sleep_on_one() -> None:
    """Sleep in one process for longer than the test would."""
    if dist.get_rank() == 1:
        time.sleep(100)


def die_on_one() -> None:
    """End one process as the kernel does when memory is short."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return True if there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_talk_to_one_another(tmp_path: Path) -> None:
    """Each has its rank, they add up numbers, and none of them is there afterwards."""
    results = run(2, total, 10.0, folder=tmp_path)

    assert [number for _, number in results] == [21.0, 21.0]
    assert len({pid for pid, _ in results}) == 2
    assert not any(is_alive(pid) for pid, _ in results)


def test_a_failure_comes_with_its_traceback(tmp_path: Path) -> None:
    """The error of a process is that of the test, with the rank and the line."""
    with pytest.raises(RanksFailedError, match="rank 1 of 2 ended with 1") as caught:
        run(2, fail_on_one, folder=tmp_path)

    assert "ValueError: this one has had enough" in str(caught.value)
    assert "in fail_on_one" in str(caught.value)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    """After the limit it is gone, and tells where it was."""
    outcomes = launch(2, sleep_on_one, folder=tmp_path, limit=1.0)

    assert [outcome.code for outcome in outcomes] == [0, 1]
    assert "in sleep_on_one" in outcomes[1].error


def test_a_process_that_is_killed_is_seen(tmp_path: Path) -> None:
    """Its code is that of the signal."""
    outcomes = launch(2, die_on_one, folder=tmp_path)

    assert outcomes[1].code == -signal.SIGKILL
