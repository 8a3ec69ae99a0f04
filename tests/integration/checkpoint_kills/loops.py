"""Kill training at random moments and resume it: ``python -m tests.integration.checkpoint_kills.loops``.

The loop saves a checkpoint after each step. A round kills it a few times, each time resumes from the
newest complete checkpoint, and at last trains to the end. Then nothing is lost if the weights, averages and
counters are those of a run without a kill, and if no checkpoint is older than the last one that was complete
before its kill; and nothing is left if no private folder is there.
"""

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import modkit
from tests.helpers import freeze
from tests.unit.files.faults import fork, wait


# A run that is killed would end here; the last one goes on, so that it saves after the last kill.
STEPS: Final = 6
MORE: Final = 2
MOST_KILLS: Final = 3
# So many features that a good part of the time is that of saving.
WIDE: Final = 8_000

Announce = Callable[[int], None]


class Loop:
    """A loop with ``save_checkpoint``, which writes to the same file each time."""

    def train(self, folder: Path, steps: int, announce: Announce) -> Any:
        """Train up to a step, from the newest checkpoint in a folder, and return all numbers at the end.

        ``announce`` is called with the step of each checkpoint that is complete.
        """
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, WIDE), nn.BatchNorm1d(WIDE), nn.Dropout(0.1), nn.Linear(WIDE, 8)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ema = modkit.EMA(model, [0.9, 0.99], precision="stochastic").attach(optimizer)
        first, path = self.newest(folder)
        if path is not None:
            checkpoint = modkit.load_checkpoint(path)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            ema.load_state_dict(checkpoint["ema"])
            torch.set_rng_state(checkpoint["rng"])
        for step in range(first + 1, steps + 1):
            batch = torch.randn(16, 8)
            optimizer.zero_grad()
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ema": ema.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
            }
            modkit.save_checkpoint(checkpoint, folder / "last.pt")
            announce(step)
        return freeze([model.state_dict(), optimizer.state_dict(), ema.state_dict()])

    def newest(self, folder: Path) -> tuple[int, Path | None]:
        """Return the newest complete checkpoint and its step, 0 if there is none."""
        path = folder / "last.pt"
        return (modkit.load_checkpoint(path)["step"], path) if path.exists() else (0, None)


def leftovers(folder: Path) -> set[Path]:
    """Return the private folders of interrupted saves."""
    return set(folder.rglob(".modkit-*"))


def start(loop: Loop, folder: Path, steps: int, result: Path) -> tuple[int, int]:
    """Train in a process of its own; return its number and a pipe of what it announces."""
    reader, announcer = os.pipe()

    def train() -> None:
        os.close(reader)
        found = loop.train(folder, steps, lambda step: write_step(announcer, step))
        result.write_bytes(pickle.dumps(found))

    child = fork(train)
    os.close(announcer)
    return child, reader


def write_step(announcer: int, step: int) -> None:
    """Announce a step."""
    os.write(announcer, struct.pack("i", step))


def last_step(reader: int) -> int:
    """Return the last step that a process announced before its end, 0 if none."""
    with os.fdopen(reader, "rb") as stream:
        announced = stream.read()
    return max((step for (step,) in struct.iter_unpack("i", announced)), default=0)


def killed(loop: Loop, folder: Path, delay: float) -> int:
    """Train, and kill it after a delay; return the last step that it announced."""
    child, reader = start(loop, folder, STEPS, folder.with_suffix(".killed"))
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return last_step(reader)


def one_round(loop: Loop, folder: Path, duration: float, wanted: Any) -> Counter[str]:
    """Kill training a few times, then train to the end; return counts, or raise if something is lost."""
    counts: Counter[str] = Counter()
    announced = 0
    for _ in range(random.randint(1, MOST_KILLS)):
        before = leftovers(folder)
        announced = max(announced, killed(loop, folder, random.uniform(0, duration)))
        counts["kills"] += 1
        counts["interrupted a save"] += bool(leftovers(folder) - before)
        step, _ = loop.newest(folder)
        assert step >= announced, f"checkpoint {step} after {announced}"
    result = folder.with_suffix(".result")
    child, reader = start(loop, folder, STEPS + MORE, result)
    wait(child)
    last_step(reader)

    assert pickle.loads(result.read_bytes()) == wanted, "the resumed run differs"
    counts["left"] += len(leftovers(folder))
    return counts


def campaign(loop: Loop, rounds: int, seed: int) -> dict[str, Any]:
    """Run some rounds; return how many kills interrupted a save, and what was lost or left."""
    random.seed(seed)
    with tempfile.TemporaryDirectory(prefix="modkit-loops-") as name:
        root = Path(name)
        whole, result = root / "whole", root / "whole.result"
        whole.mkdir()
        # The first run imports what the others find.
        loop.train(root, 1, lambda step: None)
        assert threading.active_count() == 1, "a process with threads cannot be forked safely"
        started = time.perf_counter()
        child, reader = start(loop, whole, STEPS + MORE, result)
        wait(child)
        duration = time.perf_counter() - started
        last_step(reader)
        wanted = pickle.loads(result.read_bytes())
        counts: Counter[str] = Counter(rounds=rounds)
        lost: list[str] = []
        for number in range(rounds):
            folder = root / str(number)
            folder.mkdir()
            try:
                counts.update(one_round(loop, folder, duration, wanted))
            except Exception:
                lost.append(traceback.format_exc()[-3000:])
            shutil.rmtree(folder)
    return {**counts, "lost": lost}


def main() -> None:
    """Run what the command line asks for, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = sys.stdout
    sys.stdout = sys.stderr  # where the libraries print
    json.dump(campaign(Loop(), options.rounds, options.seed), output)


if __name__ == "__main__":
    main()
