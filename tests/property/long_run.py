"""Run random operations on torch and modkit in lockstep, in quantity and without Hypothesis.

    python -m tests.property.long_run --operations 2000000 --seed 0 --processes 2 --report
    python -m tests.property.long_run --only 1474    # one sequence, and its reduced form

The seed of a sequence decides its tree and its operations. One sequence in ten runs inside
`fast_inference` blocks, against the same operations without them. Differences are kept in
``build/lockstep.json``, and make the exit code 1; ``--report`` writes the page of the docs.
"""

import argparse
import faulthandler
import json
import platform
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from tests.helpers import MODKIT, TORCH
from tests.property import scoped_sides, scoped_trees, sides, trees, vocabulary
from tests.property.operations import Operation


ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ROOT / "build" / "lockstep.json"
# After how many operations everything is compared; after the others a glance must do.
EVERY: Final = 10
# A sequence that takes more memory is a difference, and does not exhaust the machine.
MEMORY: Final = 8 * 2**30
# A process runs so many sequences: some operations leave classes behind.
PORTION: Final = 400
SLOW: Final = 300

TREES: Final = trees.trees()
OPERATIONS: Final = vocabulary.drawn()
SCOPED_TREES: Final = scoped_trees.trees()
SCOPED: Final = vocabulary.drawn_in_scopes(scoped_sides.ScopedSide.operations)
PAIRS: Final = ((TORCH, TORCH), (MODKIT, MODKIT), (TORCH, MODKIT))


class Sequence:
    """A tree and operations, as the seed decides them."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.scoped = source.randrange(10) == 0
        self.tree: Any = (SCOPED_TREES if self.scoped else TREES).draw(source)
        operations = SCOPED if self.scoped else OPERATIONS
        self.pair = PAIRS[source.randrange(len(PAIRS))]
        self.operations = [operations.draw(source) for _ in range(source.randint(20, 60))]
        if self.scoped and source.randrange(4):
            self.operations.insert(0, Operation("enter_scope", 0, ()))

    def run(self, operations: list[Operation] | None = None, every: int = EVERY) -> Any:
        """Run the operations, or some of them; raise if they differ."""
        chosen = self.operations if operations is None else operations
        if self.scoped:
            return scoped_sides.lockstep(self.pair, self.tree, chosen, every)
        return sides.lockstep(self.tree, chosen, every)

    def fault(self, operations: list[Operation], every: int = EVERY) -> str:
        """Return the difference of a run of the operations, or None."""
        try:
            self.run(operations, every)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def reduced(self) -> tuple[str, list[Operation]]:
        """Remove operations while the difference appears after the same kind of operation."""
        every = 1 if self.fault(self.operations, 1) else EVERY
        text, kept = self.fault(self.operations, every), self.operations
        kind = after(text)
        latest = time.monotonic() + SLOW
        for index in reversed(range(len(kept))):
            if time.monotonic() > latest:
                break
            fewer = kept[:index] + kept[index + 1 :]
            found = self.fault(fewer, every)
            if found and after(found) == kind:
                text, kept = found, fewer
        return text, kept


def after(text: str) -> str:
    """Return the kind of the operation before a difference, or the kind of error."""
    return text.partition("kind='")[2].partition("'")[0] or text.partition(":")[0]


def portion(first: int, count: int) -> dict[str, Any]:
    """Run the sequences of a range of seeds."""
    kinds: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    found: dict[str, Any] = {"kinds": kinds, "rows": rows, "skipped": 0, "refused": 0}
    differences = []
    for seed in range(first, first + count):
        faulthandler.dump_traceback_later(SLOW, exit=True)
        sequence = Sequence(seed)
        try:
            run = sequence.run()
        except Exception as error:
            faulthandler.cancel_dump_traceback_later()
            text, kept = sequence.reduced()
            text = text or f"not found again: {type(error).__name__}: {error}"
            tree = repr(sequence.tree)
            differences.append(
                {"seed": seed, "text": text, "tree": tree, "kept": [*map(repr, kept)]}
            )
            continue
        kinds.update(run.kinds)
        rows.update(run.explained)
        found["skipped"] += run.skipped
        found["refused"] += run.refusals
    faulthandler.cancel_dump_traceback_later()
    return {**found, "differences": differences}


def in_process(first: int) -> dict[str, Any]:
    """Run a portion in a new process; a crash counts as a difference."""
    command = [sys.executable, "-m", "tests.property.long_run", "--portion", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        text = f"seeds from {first}: exit code {done.returncode}\n{done.stderr[-3000:]}"
        return {"differences": [{"seed": first, "text": text, "tree": "", "kept": []}]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def fresh(seed: int) -> dict[str, Any]:
    """Return the empty account of a run."""
    return {
        "date": "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        # Which commit ran which seeds: the same sequence comes of a seed on the same commit.
        "commits": {},
        "operations": 0,
        "sequences": 0,
        "seeds": [seed, seed - 1],
        "seconds": 0,
        "skipped": 0,
        "refused": 0,
        "classes": len(trees.NODES),
        "differences": [],
        "rows": {},
        "kinds": {},
    }


def add(account: dict[str, Any], result: dict[str, Any]) -> None:
    for name in ("skipped", "refused"):
        account[name] += result.get(name, 0)
    for name in ("kinds", "rows"):
        total = Counter(account[name]) + Counter(result.get(name, {}))
        account[name] = dict(sorted(total.items()))
    account["operations"] = sum(account["kinds"].values())
    account["sequences"] += PORTION
    account["seeds"][1] += PORTION
    account["differences"] += result["differences"]


def campaign(account: dict[str, Any], operations: int, processes: int) -> None:
    """Run portions until enough operations have run on both sides."""
    started, before, already = time.perf_counter(), account["seconds"], account["operations"]
    account["date"] = datetime.now(timezone.utc).date().isoformat()
    ran = commit()
    began = first = account["seeds"][1] + 1
    with ThreadPoolExecutor(processes) as pool:
        running = []
        while account["operations"] < operations or running:
            while len(running) < processes and account["operations"] < operations:
                running.append(pool.submit(in_process, first))
                first += PORTION
            add(account, running.pop(0).result())
            seconds = time.perf_counter() - started
            account["seconds"] = before + round(seconds)
            account["commits"][ran] = [began, account["seeds"][1]]
            write_json(KEPT, account)
            done, faults = account["operations"], len(account["differences"])
            rate = (done - already) / seconds
            print(f"{done:,} operations, {rate:.0f}/s, {faults} differences", flush=True)


def commit() -> str:
    """Return the commit that ran."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")


def still_differs(seed: int) -> bool:
    """Return True if the sequence of a seed has a difference on the present code."""
    sequence = Sequence(seed)
    return bool(sequence.fault(sequence.operations))


def show(seed: int) -> None:
    """Print one sequence with a difference, reduced."""
    sequence = Sequence(seed)
    text, kept = sequence.reduced()
    print(sequence.tree, *kept, text or "no difference", sep="\n")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the last run, and try its differences again",
    )
    parser.add_argument("--only", type=int, help="the seed of one sequence, to be shown")
    parser.add_argument("--portion", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.portion is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        print(json.dumps(portion(given.portion, PORTION)))
        return
    if given.only is not None:
        show(given.only)
        return
    account = fresh(given.seed)
    if given.resume:
        account = json.loads(KEPT.read_text(encoding="utf-8"))
        # The code may have been repaired since.
        account["differences"] = [d for d in account["differences"] if still_differs(d["seed"])]
    campaign(account, given.operations, given.processes)
    sys.exit(bool(account["differences"]))


if __name__ == "__main__":
    main()
