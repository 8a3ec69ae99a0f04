"""Training one network in one way, and what came of it."""

import hashlib
import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.launcher import run
from tests.distributed.modules.modes import MODES, Mode
from tests.distributed.modules.talk import Talk
from tests.distributed.modules.tasks import TASKS, Task, batch_of
from tests.helpers import MODKIT, TORCH, Implementation, seed_everything


STEPS = 20

# By a module of torch's, when the first graph is compiled by inductor.
SAID_ON_IMPORT = "`torch.jit.script_method` is"

Case = tuple[str, str]
# For each process: what torch and modkit have come to.
Found = list[dict[Case, dict[str, dict[str, Any]]]]


def cases(tasks: tuple[str, ...], modes: tuple[str, ...], ranks: int) -> list[Case]:
    """Return each task with each mode that is for it."""
    return [
        (task, mode)
        for task in tasks
        for mode in modes
        if MODES[mode].ranks in {None, ranks} and task in (MODES[mode].only or tasks)
    ]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor, wherever they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(model: torch.nn.Module) -> str:
    """Return a number for the names, kinds and bits of all parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        if isinstance(tensor, DTensor):
            found.update(f"{tensor.placements}{tuple(tensor.to_local().shape)}".encode())
        values = whole(tensor.detach()).contiguous().reshape(-1)
        found.update(values.view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return found.hexdigest()


def step(model: torch.nn.Module, task: Task, mode: Mode, number: int) -> float:
    """Add up the gradients of one batch; return its loss."""
    rank, ranks = (0, 1) if mode.same_data else (dist.get_rank(), dist.get_world_size())
    batch = batch_of(task, number, rank, ranks)
    if mode.same_data:
        parts_of_all = [
            batch_of(task, number, one, dist.get_world_size())
            for one in range(dist.get_world_size())
        ]
        batch = tuple(torch.cat(column) for column in zip(*parts_of_all, strict=True))
    loss = task.loss(model, *batch)
    loss.backward()
    return float(whole(loss.detach()))


def train(impl: Implementation, task: Task, mode: Mode, *, counted: bool) -> dict[str, Any]:
    """Train; return the losses, a number for the end, and how often the processes have talked."""
    model = mode.wrap(task.network(impl), task)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    seed_everything(dist.get_rank() if not mode.same_data else 0)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(model, task, mode, number))
        optimizer.step()
    end = digest(model)
    talk = Talk()
    # A compiled graph is not the same one under a mode.
    if counted:
        with talk:
            step(model, task, mode, STEPS)
    return {
        "losses": losses,
        "end": end,
        "talk": dict(talk.counts),
        "nbytes": dict(talk.nbytes),
    }


def outcome(impl: Implementation, task: Task, mode: Mode) -> dict[str, Any]:
    """Train; return what came of it, or the error, and what was warned of."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = train(impl, task, mode, counted=not mode.compiled)
        except Exception:
            result = {"raised": traceback.format_exc()}
    warned = sorted({f"{one.category.__name__}: {one.message}" for one in caught})
    return {**result, "warned": [text for text in warned if SAID_ON_IMPORT not in text]}


def compare(which: list[Case]) -> dict[Case, dict[str, dict[str, Any]]]:
    """Run in each process: train all of them on torch and on modkit."""
    found = {}
    for task, mode in which:
        found[task, mode] = {
            str(impl): outcome(impl, TASKS[task], MODES[mode]) for impl in (TORCH, MODKIT)
        }
        dist.barrier()
    return found


def train_all(which: list[Case], folder: Path, ranks: int = 2) -> Found:
    """Train each case on torch and on modkit, all in the same processes."""
    return run(ranks, compare, which, folder=folder, limit=250.0, timeout=60.0)


def assert_same(found: Found, case: Case) -> None:
    """Assert that torch and modkit came to the same, bit by bit, in each process."""
    for by_case in found:
        theirs, ours = by_case[case]["torch"], by_case[case]["modkit"]

        assert "raised" not in ours, ours["raised"]
        assert theirs == ours
        assert len(ours["losses"]) == STEPS
        assert all(map(math.isfinite, ours["losses"]))
