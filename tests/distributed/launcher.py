"""Running one function on the ranks of a group of torch.distributed.

The processes meet at a file, so no port has to be free. Whatever happens, none is left behind.
"""

import datetime as dt
import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import context


# How long the others go on after one process has failed, and how long they may take to start.
GRACE = 5.0
STARTING = 30.0


@dataclass
class Outcome:
    """The result of one process, the traceback of its error or of where it hung, and its exit code."""

    rank: int
    result: Any
    error: str
    code: int | None


class RanksFailedError(Exception):
    """Some of the processes have failed; the message has their tracebacks."""


def launch(
    ranks: int,
    function: Callable[..., Any],
    *args: object,
    folder: Path,
    limit: float = 60.0,
    timeout: float = 20.0,
    grace: float = GRACE,
) -> list[Outcome]:
    """Call ``function(*args)``, which can be imported, on each rank; return the outcomes.

    ``folder`` is empty, and used once. After ``limit`` seconds a process is ended with a traceback;
    ``timeout`` is for its collectives, and ``grace`` for the others after one has failed.
    """
    place = folder / "launched"
    place.mkdir(parents=True)
    processes = [
        context().Process(
            target=_run,
            args=(rank, ranks, place, limit, timeout, function, args),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes, limit + STARTING, grace)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()
    return [_outcome(rank, place, process.exitcode) for rank, process in enumerate(processes)]


def run(ranks: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """Do what :func:`launch` does; return what the function returned, or raise if it has failed."""
    outcomes = launch(ranks, function, *args, **options)
    if any(outcome.code for outcome in outcomes):
        raise RanksFailedError(
            "\n".join(
                f"rank {one.rank} of {ranks} ended with {one.code}\n{one.error}" for one in outcomes
            )
        )
    return [outcome.result for outcome in outcomes]


def _wait(processes: list[Any], limit: float, grace: float) -> None:
    end = time.monotonic() + limit
    waiting = list(processes)
    failed = False
    while waiting and (left := end - time.monotonic()) > 0:
        connection.wait([process.sentinel for process in waiting], left)
        waiting = [process for process in waiting if process.is_alive()]
        if not failed and any(process.exitcode for process in processes):
            failed = True
            end = min(end, time.monotonic() + grace)


def _outcome(rank: int, place: Path, code: int | None) -> Outcome:
    result, error = place / f"{rank}.pt", place / f"{rank}.txt"
    return Outcome(
        rank,
        # It was written by this very test.
        torch.load(result, weights_only=False) if result.exists() else None,
        error.read_text() if error.exists() else "",
        code,
    )


def _run(
    rank: int,
    ranks: int,
    place: Path,
    limit: float,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    """Run in each of the processes."""
    # Collections would look at all objects of the modules that are preloaded.
    gc.freeze()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    with (place / f"{rank}.txt").open("w") as error:
        faulthandler.dump_traceback_later(limit, exit=True, file=error)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{place / 'store'}",
                rank=rank,
                world_size=ranks,
                timeout=dt.timedelta(seconds=timeout),
            )
            # A rank that ends at once must not leave the others while they still connect.
            dist.barrier()
            torch.save(function(*args), place / f"{rank}.pt")
            dist.destroy_process_group()
        except BaseException:
            # The errors of checkpoints do not derive from `Exception`.
            traceback.print_exc(file=error)
            error.flush()
            faulthandler.cancel_dump_traceback_later()
            sys.exit(1)
        faulthandler.cancel_dump_traceback_later()
