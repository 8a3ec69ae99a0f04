"""Run faults x writers and print the results as JSON: ``python -m tests.unit.files.fault_runs --help``.

Each trial runs in a forked process. That is why the tests start this file as a program: forking pytest
itself would copy its threads.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from tests.unit.files.failing_calls import library
from tests.unit.files.faults import FAULTS, Fault, NotPossible, fork
from tests.unit.files.writers import WRITERS, Writer


_DEADLINE: Final = 120


def trial(one: Fault, writer: Writer, count: int, folder: Path, sender: int) -> None:
    """Run a fault in a folder, and send what came of it as JSON."""
    place = folder / "saved"
    place.mkdir()
    for path in (folder, place):
        path.chmod(0o755)
    user = os.geteuid()
    try:
        answer = {"intact": one.run(writer, place, count) or "intact"}
    except NotPossible as reason:
        answer = {"skipped": str(reason)}
    except BaseException:
        answer = {"lost": traceback.format_exc()[-3000:]}
    os.seteuid(user)
    os.write(sender, json.dumps(answer).encode())


def outcome(one: Fault, writer: Writer, count: int) -> dict[str, str]:
    """Run one trial in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="modkit-faults-"))
    reader, sender = os.pipe()

    def run() -> None:
        os.setsid()
        signal.alarm(_DEADLINE)
        trial(one, writer, count, folder, sender)

    child = fork(run)
    os.close(sender)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, str] = json.loads(answer) if answer else {"lost": "the process died"}
    return found


def campaign(
    names: list[str], faults: list[str], rounds: dict[str, int], elements: int
) -> dict[str, Any]:
    """Run trials of each fault for each writer.

    Args:
        names: Names of writers.
        faults: Names of faults.
        rounds: Number of trials of ``random`` and of ``other`` faults, and of ``saves``.
        elements: Number of elements that ``large`` faults save.
    """
    found: dict[str, Any] = {}
    for name in names:
        small, large = WRITERS[name](5_000), WRITERS[name](elements)
        with tempfile.TemporaryDirectory() as folder:
            # So that no trial spends its time on imports.
            small.save(Path(folder, small.file), 1)
            small.load(Path(folder, small.file))
        assert threading.active_count() == 1, "a process with threads cannot be forked safely"
        for one in (FAULTS[each] for each in faults):
            trials = rounds["random"] if one.random else 1 if one.saves else rounds["other"]
            writer, count = (large if one.large else small), rounds["saves"] if one.saves else 0
            answers = [outcome(one, writer, count) for _ in range(trials)]
            if "skipped" in answers[0]:
                found.setdefault(one.name, {})[name] = answers[0]
                continue
            unit = count or 1
            intact = [answer["intact"] for answer in answers if "intact" in answer]
            found.setdefault(one.name, {})[name] = {
                "trials": unit * trials,
                "intact": unit * len(intact),
                "notes": dict(Counter(note for note in intact if note != "intact")),
                "lost": next((answer["lost"] for answer in answers if "lost" in answer), None),
            }
    return found


ROOT: Final = Path(__file__).resolve().parents[3]


def run(
    writers: list[str],
    faults: list[str] | None = None,
    python: str = sys.executable,
    **rounds: int,
) -> dict[str, Any]:
    """Run a campaign in a process of its own, and return what it found.

    Args:
        writers: Names of writers.
        faults: Names of faults; all by default.
        python: The interpreter.
        **rounds: The options of the command line.
    """
    names = ["--writers", ",".join(writers), "--faults", ",".join(faults or FAULTS)]
    numbers = [f"--{name}={number}" for name, number in rounds.items()]
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.unit.files.fault_runs", *names, *numbers],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library() or "")},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", default=",".join(WRITERS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--random", type=int, default=5, help="trials of random faults")
    parser.add_argument("--other", type=int, default=1, help="trials of other faults")
    parser.add_argument("--saves", type=int, default=20, help="saves of two writers to one path")
    parser.add_argument("--elements", type=int, default=1_000_000, help="in large files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = {name: getattr(options, name) for name in ("random", "other", "saves")}
    output = sys.stdout
    sys.stdout = sys.stderr  # where the libraries print
    names, faults = options.writers.split(","), options.faults.split(",")
    json.dump(campaign(names, faults, rounds, options.elements), output)


if __name__ == "__main__":
    main()
