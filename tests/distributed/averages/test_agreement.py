"""Errors and disagreements of ranks in export_average, FullState and load_averages."""

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import modkit
import modkit.distributed as facade
from modkit.distributed import FullState, export_average, load_averages
from tests.distributed.averages.networks import (
    averages_of,
    differing,
    network,
    split,
    trained,
)
from tests.distributed.launcher import run


Break = Callable[[pytest.MonkeyPatch], object]


def fails_to_gather(patch: pytest.MonkeyPatch) -> None:
    """Fail after the collective of the third tensor, as where host memory is short."""
    real, calls = facade.whole_tensor, []

    def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
        full = real(tensor)
        calls.append(tensor)
        if len(calls) == 3:
            message = "host memory is short"
            raise MemoryError(message)
        return full

    patch.setattr(facade, "whole_tensor", whole_tensor)


def fails_to_write(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Fail to write a safetensors file."""

    def save(*_: object) -> None:
        raise error

    patch.setattr(facade, "save_safetensors", save)


class Unsendable(Exception):
    """An error that cannot be pickled as it is."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")
# The suffix of the file, the rank that fails, what breaks there, and the error of all ranks.
BROKEN: dict[str, tuple[str, int, Break, str]] = {
    "gather .pt": (".pt", 0, fails_to_gather, "MemoryError: host memory is short"),
    "gather .safetensors": (".safetensors", 0, fails_to_gather, "MemoryError: host memory is"),
    "gather on another rank": (".pt", 1, fails_to_gather, "MemoryError: host memory is short"),
    "gather on the last rank": (".safetensors", 2, fails_to_gather, "MemoryError: host memory is"),
    "full disk": (".safetensors", 0, lambda p: fails_to_write(p, FULL_DISK), "OSError: [Errno 28]"),
    "unsendable": (
        ".safetensors",
        0,
        lambda p: fails_to_write(p, Unsendable("cannot be", "pickled")),
        "Unsendable: cannot be pickled",
    ),
    "ctrl-c": (
        ".safetensors",
        0,
        lambda p: fails_to_write(p, KeyboardInterrupt()),
        "KeyboardInterrupt: ",
    ),
}


def counted(ranks: set[int]) -> "modkit.EMA[Any]":
    """Return averages with one more update on some ranks."""
    ema = trained(2, decay=0.5)
    if dist.get_rank() in ranks:
        ema.update()
    return ema


def unequal(rows: int) -> "modkit.EMA[Any]":
    """Return averages of a layer that has another size on rank 2."""
    ema: modkit.EMA[Any] = modkit.EMA(nn.Linear(2, rows if dist.get_rank() == 2 else 4), decay=0.5)
    ema.update()
    return ema


def load_partly(folder: Path) -> None:
    """Load a folder that rank 1 does not see."""
    ema = trained(1, decay=0.5)
    dcp.save({"ema": ema}, checkpoint_id=folder / "saved")
    load_averages(ema, folder / ("nowhere" if dist.get_rank() == 1 else "saved"))


def load_nothing(_: Path) -> None:
    """Load what FullState.state_dict() returns on each rank, which only rank 0 has."""
    state = FullState(trained(1, decay=0.5))
    state.load_state_dict(state.state_dict())


def load_invalid(_: Path) -> None:
    """Load a state that is invalid on one rank alone."""
    ema = trained(1, decay=0.5)
    state = ema.state_dict()
    version = 99 if dist.get_rank() == 1 else 1
    FullState(ema).load_state_dict({**state, "version": version})


def without_update() -> "modkit.EMA[Any]":
    """Return averages that have not begun on rank 1."""
    ema: modkit.EMA[Any] = modkit.EMA(split(network()), decay=0.5)
    if dist.get_rank() != 1:
        ema.update()
    return ema


# Calls in which the ranks disagree, and what all of them raise.
DISAGREEING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no update": (
        lambda folder: export_average(without_update(), folder / "a.pt"),
        "RuntimeError: export_average: EMA(FSDPSequential, Constant(decay=0.5), step=0",
    ),
    "index": (
        lambda folder: export_average(counted(set()), folder / "a.pt", index=dist.get_rank()),
        "IndexError: EMA: index is 1, and there are 1 averages",
    ),
    "updates": (
        lambda folder: export_average(counted({1}), folder / "a.pt"),
        "n_averaged is 2 on rank 0 and 3 on rank 1",
    ),
    "updates of a full state": (
        lambda _: FullState(counted({2})).state_dict(),
        "step is 2 on rank 0 and 3 on rank 2",
    ),
    "shapes": (
        lambda folder: export_average(unequal(5), folder / "a.pt"),
        "weight is torch.float32 (4, 2) on rank 0 and torch.float32 (5, 2) on rank 2",
    ),
    "folder": (load_partly, "FileNotFoundError: [Errno 2] No such file or directory"),
    "empty state": (load_nothing, "ValueError: FullState.load_state_dict(): some ranks have no"),
    "invalid state": (load_invalid, "ValueError: EMA: the state has version 99"),
}


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """Return the error of a call and how long it took."""
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


def fail_in_all_ways(folder: Path) -> dict[str, tuple[str, float, int]]:
    """Run on each of three ranks, one way after the other, in one group that stays usable."""
    found = {}
    for name, (suffix, rank, breaks, _) in BROKEN.items():
        ema = trained(2, decay=0.5)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                breaks(patch)
            file = folder / f"average{suffix}"
            error, seconds = outcome(lambda ema=ema, file=file: export_average(ema, file))
        count = torch.ones(1)
        dist.all_reduce(count)
        found[name] = (error, seconds, int(count))
    for name, (call, _) in DISAGREEING.items():
        error, seconds = outcome(lambda call=call: call(folder))
        count = torch.ones(1)
        dist.all_reduce(count)
        found[name] = (error, seconds, int(count))
    return found


@pytest.mark.distributed
def test_an_error_on_any_rank_is_that_of_all_ranks(tmp_path: Path) -> None:
    """It comes within seconds, no file is left behind, and the group can be used afterwards."""
    folder = tmp_path / "files"
    folder.mkdir()
    ranks = run(3, fail_in_all_ways, folder, folder=tmp_path, limit=120.0)

    expected = {name: error for name, (*_, error) in (BROKEN | DISAGREEING).items()}
    for found in ranks:
        for name, (error, seconds, count) in found.items():
            assert expected[name] in error, name
            assert seconds < 10, name
            assert count == 3, name
    for name in expected.keys() - {"ctrl-c", "unsendable"}:
        assert len({found[name][0] for found in ranks}) == 1, name
    assert [path.name for path in folder.iterdir()] == ["saved"]


def save_on_one_rank(folder: Path) -> dict[str, Any]:
    """Save the state of rank 0, as libraries do, and load it on each rank."""
    ema = trained(3, decay=[0.5, 0.9])
    found: dict[str, Any] = {"average": averages_of(ema, 1)}
    for name, content in {"shards": ema.state_dict(), "full": FullState(ema).state_dict()}.items():
        if dist.get_rank() == 0:
            modkit.save_checkpoint(content, folder / name)
        dist.barrier()
        found[name] = load_on_all_ranks(folder, name)
    found["bytes"] = sum(t.nbytes for t in tensors_of(FullState(ema).state_dict()))
    torch.save(ema.state_dict(), folder / f"own-{dist.get_rank()}")
    found["own"] = load_on_all_ranks(folder, f"own-{dist.get_rank()}")
    return found


def load_on_all_ranks(folder: Path, name: str) -> Any:
    """Return the loaded average, or the error."""
    ema: modkit.EMA[Any] = modkit.EMA(split(network()), decay=[0.5, 0.9])
    state = FullState(ema) if name == "full" else ema
    error, _ = outcome(lambda: state.load_state_dict(modkit.load_checkpoint(folder / name)))
    return error or averages_of(ema, 1)


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield state
    for value in (
        state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    ):
        yield from tensors_of(value)


def load_elsewhere(folder: Path) -> dict[str, Any]:
    """Run on each of three ranks, or on one: load what two ranks have saved."""
    return {name: load_on_all_ranks(folder, name) for name in ("shards", "full")}


def test_a_state_that_one_rank_saved(tmp_path: Path) -> None:
    """Shards of one rank are refused on all ranks; the full state loads at any world size."""
    folder = tmp_path / "files"
    folder.mkdir()
    two = run(2, save_on_one_rank, folder, folder=tmp_path / "two")
    others = [*run(3, load_elsewhere, folder, folder=tmp_path / "three")]
    others += run(1, load_elsewhere, folder, folder=tmp_path / "one")

    average = two[0]["average"]
    for found in two + others:
        assert "holds the shards of another rank" in found["shards"]
        assert "FullState(ema)" in found["shards"]
        assert differing(found["full"], average) == []
    for found in two:
        assert differing(found["own"], average) == []
    # Rank 0 has the averages in full, and the other rank nothing.
    assert two[0]["bytes"] >= 2 * sum(t.nbytes for t in average.values()) - 100
    assert two[1]["bytes"] == 0
