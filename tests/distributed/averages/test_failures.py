import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import modkit
from modkit.averaging.sharding import local_shard
from modkit.distributed import export_average
from tests.distributed.averages.networks import (
    differing,
    network,
    sgd,
    split,
    take_step,
    train,
)
from tests.distributed.launcher import launch


def shards(ema: "modkit.EMA[Any]", index: int) -> dict[str, Tensor]:
    """Return a copy of what this process has of an average."""
    return {name: local_shard(t).clone() for name, t in ema.named_averages(index)}


class Breaks(TorchDispatchMode):
    """Ends the update in its second average, by an error or for good."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the steps, and let the first one pass."""
        if "lerp" in str(func):
            self.seen += 1
            if self.seen > 1 and self.how == "error":
                message = "memory is short"
                raise MemoryError(message)
            if self.seen > 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def break_on_one(how: str, folder: Path) -> None:
    """Have one process fail in the middle of an update, and go on with the other one."""
    ema = modkit.EMA(split(network()), decay=[0.5, 0.9])
    optimizer = sgd(ema.model)
    train(ema, optimizer, 0, 3)
    take_step(ema.model, optimizer, 3)
    before = [shards(ema, index) for index in (0, 1)]
    if torch.distributed.get_rank() == 1:
        with Breaks(how):
            ema.update()
        return
    ema.update()
    expected = []
    for average, decay in zip(before, (0.5, 0.9), strict=True):
        now = {name: local_shard(p.detach()) for name, p in ema.model.named_parameters()}
        now |= dict(ema.model.named_buffers())
        moved = {
            name: t.lerp(now[name], 1 - decay)
            for name, t in average.items()
            if t.is_floating_point()
        }
        expected.append({**now, **{n: t for n, t in moved.items() if "running" not in n}})
    torch.save(
        {"found": [shards(ema, index) for index in (0, 1)], "expected": expected, "step": ema.step},
        folder / "first.pt",
    )
    export_average(ema, folder / "average.pt")


@pytest.mark.parametrize(
    ("how", "code"),
    [pytest.param("error", 1, marks=pytest.mark.distributed), ("kill", -signal.SIGKILL)],
)
def test_a_process_that_fails_leaves_the_others_whole(how: str, code: int, tmp_path: Path) -> None:
    """Each average of the other one has taken the step, and what needs both ends in an error."""
    folder = tmp_path / "files"
    folder.mkdir()
    first, second = launch(2, break_on_one, how, folder, folder=tmp_path, timeout=5.0)
    saved = torch.load(folder / "first.pt")

    assert second.code == code
    assert ("MemoryError: memory is short" in second.error) == (how == "error")
    assert saved["step"] == 4
    assert differing(saved["found"], saved["expected"]) == []
    assert first.code == 1
    assert "RuntimeError" in first.error
    assert "export_average" in first.error
    assert [path.name for path in folder.iterdir()] == ["first.pt"]


def hang_on_one(folder: Path) -> None:
    """Have one process sleep while the other one averages."""
    net = split(network())
    ema = modkit.EMA(net, decay=0.5)
    careful = modkit.EMA(net, decay=0.5, on_nonfinite="skip")
    optimizer = sgd(net)
    for number in range(3):
        take_step(net, optimizer, number)
        ema.update()
        careful.update()
    take_step(net, optimizer, 3)
    if torch.distributed.get_rank() == 1:
        time.sleep(60)
    before = shards(careful, 0)
    ema.update()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        careful.update()
    found = {
        "message": str(caught.value),
        "seconds": time.monotonic() - start,
        "steps": (ema.step, careful.step),
        "differing": differing(shards(careful, 0), before),
    }
    torch.save(found, folder / "first.pt")
    message = "over"
    raise RuntimeError(message)


@pytest.mark.distributed
def test_a_process_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """An update needs no other rank; a collective one ends with torch's timeout, changing nothing."""
    launch(2, hang_on_one, tmp_path, folder=tmp_path / "run", timeout=2.0, grace=0.1)
    found = torch.load(tmp_path / "first.pt")

    assert "Timed out waiting 2000ms" in found["message"]
    assert found["seconds"] < 10
    assert found["steps"] == (4, 3)
    assert found["differing"] == []
