"""Read corrupt and hostile files: each is refused with FileError, or read as torch reads it.

A fifth of the inputs are others: shards and indices, states of averages, snapshots, and commands.

    python -m tests.fuzz.fuzz_files                               # 100,000 files
    python -m tests.fuzz.fuzz_files --seed 7 --seconds 60         # others, for a minute
    python -m tests.fuzz.fuzz_files --seed 7 --only 1474          # one file, with the traceback

Workers read the files; one that dies or takes too long names its file. Files that show a fault are kept in
``build/fuzz``. The seed and the number of a file determine it, on one version of torch.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import mmap
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from modkit import jit
from modkit._upstream import shares_all_storages
from modkit.errors import FileError
from modkit.files.checkpoint_values import readable_names
from tests.fuzz.mutations import Case, Dice, case, corrupted, seeds
from tests.fuzz.other_inputs import LONGEST, outcome_of_input
from tests.unit.files.hostile import average, load, load_mapped
from tests.unit.files.raw_zip import replaced
from tests.unit.files.same_objects import difference, outcome


ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz"
MEMORY = 2 << 30
SLOW = 1.0  # seconds of CPU time
# A process reads so many files: torch keeps the types of every TorchScript archive.
PORTION = 5000
CLOCK = struct.Struct("<qd")


class Fault(NamedTuple):
    """A fault of a reader."""

    number: int
    reader: str
    what: str
    text: str


def script(path: Path) -> Any:
    """Read a TorchScript archive, and return its tensors."""
    return script_parts(jit.load(path))


def script_parts(module: Any) -> Any:
    """Return the contents of a compiled module without calling it, since its code may not terminate."""
    return dict(module.state_dict())


# Modkit reads these in any file, with arguments that it has checked.
ALLOWED: list[Any] = [
    argparse.Namespace,
    bytes,
    *((value, name) for name, value in readable_names({"numpy.dtype"}).items()),
    *(type(np.dtype(code)) for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    *(type(np.dtype(code)) for code in ("f2", "f4", "f8", "c8", "c16")),
]


def torch_load(path: Path) -> Any:
    """Read a checkpoint with torch."""
    with torch.serialization.safe_globals(ALLOWED):
        return torch.load(path, weights_only=True)


def torch_load_mapped(path: Path) -> Any:
    """Read a checkpoint with torch; empty storages that share a key differ from reading without mmap."""
    with torch.serialization.safe_globals(ALLOWED):
        return torch.load(path, weights_only=True, mmap=True)


def torch_average(path: Path) -> Any:
    """Return the tensors in a checkpoint, as in the average of one file."""
    with torch.serialization.safe_globals(ALLOWED):
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {name: torch.Tensor.detach(value) for name, value in dict.items(found)}


def torch_script(path: Path) -> Any:
    """Read a TorchScript archive with torch."""
    return script_parts(torch.jit.load(path))


def in_files(name: str) -> Callable[[Path], Any] | None:
    """Return a function of modkit.files, if it is there."""
    function: Callable[[Path], Any] | None = getattr(
        importlib.import_module("modkit.files"), name, None
    )
    return function


# By name: the reader of modkit, and its equivalent in torch.
READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any] | None]] = {
    "load_checkpoint": (load, torch_load),
    "mmap": (load_mapped, torch_load_mapped),
    "average_checkpoints": (average, torch_average),
    "jit.load": (script, torch_script),
    **{
        name: (function, None)
        for name in ("inspect", "verify")
        if (function := in_files(name)) is not None
    },
}


def same_values(found: Any, expected: Any) -> str:
    """Return the difference between averages or modules; averages have separate storages."""
    if found.keys() != expected.keys():
        return f"names {[*found]} instead of {[*expected]}"
    for name, value in found.items():
        other = expected[name]
        if isinstance(value, dict):
            if text := same_values(value, other):
                return text
        elif isinstance(value, torch.Tensor):
            equal = value.dtype == other.dtype and value.shape == other.shape
            if not equal or bits(value) != bits(other):
                return f"{name!r} has other values"
        elif value != other:
            return f"{name!r} is {value!r} instead of {other!r}"
    return ""


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, without its gaps."""
    if tensor.is_meta:
        return str(tensor.stride()).encode()
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    if not plain.numel():
        return b""
    raw: bytes = (
        torch.empty(len(plain), dtype=plain.dtype).copy_(plain).view(torch.uint8).numpy().tobytes()
    )
    return raw


@functools.cache
def intact(name: str, reader: str) -> Any:
    """Return the result of torch's reader for an intact file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "intact.pt")
        path.write_bytes(seeds()[name])
        expected = READERS[reader][1]
        assert expected is not None
        return expected(path)


def readers_of(chosen: Case, number: int) -> Iterator[str]:
    """Return the readers for a file: those of its kind, and sometimes all."""
    is_script = chosen.name == "script"
    for reader in READERS:
        for_scripts = reader == "jit.load"
        if reader in {"inspect", "verify"} or for_scripts == is_script or number % 10 == 0:
            yield reader


def faults_of(chosen: Case, number: int, folder: Path, counts: Counter[str]) -> Iterator[Fault]:
    """Read a file with all readers, and yield the errors."""
    if chosen.how == "other":
        yield from faults_of_input(chosen, number, folder, counts)
        return
    # A new name each time: tensors of the last file may still be mapped from it.
    path = folder / f"{number}.pt"
    path.write_bytes(chosen.data)
    try:
        for reader in readers_of(chosen, number):
            start = time.process_time()
            what, text = outcome_of(reader, chosen, path)
            counts[f"{reader}, {'right' if chosen.checked else 'wrong'} checksums: {what}"] += 1
            if text:
                yield Fault(number, reader, what, text)
            taken = time.process_time() - start
            if taken > SLOW:
                yield Fault(number, reader, "slow", f"{taken:.1f} s")
    finally:
        path.unlink()


def faults_of_input(
    chosen: Case, number: int, folder: Path, counts: Counter[str]
) -> Iterator[Fault]:
    """Try an input that is not a file, and yield the errors."""
    name, start = chosen.name, time.process_time()
    place = folder / f"other {number}"
    try:
        what, text = outcome_of_input(name, Dice(chosen.data), place, corrupted)
    except Exception as error:
        what, text = "leak", "".join(traceback.format_exception(error))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    counts[f"{name}: {what}"] += 1
    if text:
        yield Fault(number, name, what, text[-4000:])
    taken = time.process_time() - start
    if taken > 5 * SLOW:
        yield Fault(number, name, "slow", f"{taken:.1f} s")


def outcome_of(reader: str, chosen: Case, path: Path) -> tuple[str, str]:
    """Read a file with one reader; return the outcome, and a text if it is an error."""
    try:
        found = READERS[reader][0](path)
    except FileError as error:
        text = str(error)
        if not text.isprintable() or str(path) not in text or len(text) > LONGEST:
            return "bad text", text
        return "FileError", ""
    except Exception as error:
        # A script that is not corrupt is compiled, and torch says what is wrong with the code.
        if reader == "jit.load" and chosen.checked and isinstance(error, RuntimeError):
            return "RuntimeError", ""
        return "leak", "".join(traceback.format_exception(error))
    expected = READERS[reader][1]
    if expected is None:
        return "read", ""
    right, refused = outcome(expected, path) if chosen.checked else (None, LookupError())
    if isinstance(refused, UnicodeDecodeError):
        # torch reads the id of a file as text, and does nothing with it.
        other = path.with_suffix(".other")
        other.write_bytes(replaced(chosen.data, {".data/serialization_id": None}))
        right, refused = outcome(expected, other)
        other.unlink()
    is_called = isinstance(refused, TypeError) and "is not callable" in str(refused)
    is_foreign = is_called or isinstance(refused, pickle.UnpicklingError)
    # An average has no flags, so that a parameter of integers is one.
    is_flag = isinstance(refused, RuntimeError) and re.search("require(s_| )grad", str(refused))
    if reader == "average_checkpoints" and (is_foreign or is_flag):
        # Classes that torch refuses, or constants that are called, do not hide the tensors.
        return "read around classes", ""
    # Torch may fail on a member that modkit does not read; modkit then returns the intact content.
    if refused is not None:
        right, refused = outcome(intact, chosen.name, reader)
    if reader == "average_checkpoints" and isinstance(refused, pickle.UnpicklingError):
        return "read around classes", ""
    if refused is not None:
        return "read, torch refuses", f"{type(refused).__name__}: {refused}"
    compare = difference if reader in {"load_checkpoint", "mmap"} else same_values
    text, uncompared = outcome(compare, found, right)
    # Torch cannot traverse some objects that a pickle can make.
    if uncompared is not None and outcome(compare, right, right)[1] is None:
        text = "".join(traceback.format_exception(uncompared))
    # Torch has each dtype of a storage since 2.15, and the first one before; averages have the first.
    is_older = shares_all_storages and chosen.name == "two dtypes of a storage"
    if text and is_older and reader == "average_checkpoints":
        return "read as by older torch", ""
    return ("read otherwise", text) if text else ("same", "")


def run(
    seed: int, numbers: range, report: Callable[[Fault], None], begun: Any = None
) -> Counter[str]:
    """Read files in this process."""
    counts: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for number in numbers:
            chosen = case(seed, number)
            if begun is not None:
                begun(number)
            for fault in faults_of(chosen, number, Path(name), counts):
                report(fault)
    return counts


def work(options: argparse.Namespace) -> int:
    """Read files in a worker: write the current one to shared memory, and all results at the end."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with options.clock.open("r+b") as file:
        clock = mmap.mmap(file.fileno(), CLOCK.size)

    def say(what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    def begun(number: int) -> None:
        clock[:] = CLOCK.pack(number, time.monotonic())

    counts = run(options.seed, range(options.start, options.files, options.step), say, begun)
    # Shutting down takes time too, and does not count as a file.
    clock[:] = CLOCK.pack(options.files, time.monotonic() + 60)
    say(counts)
    return 0


class Worker:
    """A process that reads every n-th file, and is restarted after a file that crashes it."""

    def __init__(self, options: argparse.Namespace, start: int, folder: Path) -> None:
        self._options, self._next = options, start
        self._clock, self._output = folder / f"clock {start}", folder / f"output {start}"
        self.done = False
        self._launch()

    def _launch(self) -> None:
        self._clock.write_bytes(CLOCK.pack(self._next, time.monotonic() + 60))
        options = self._options
        self._end = min(self._next + PORTION * options.workers, options.files)
        command = [sys.executable, "-m", "tests.fuzz.fuzz_files", "--clock", str(self._clock)]
        command += ["--start", str(self._next), "--step", str(options.workers)]
        command += ["--files", str(self._end), "--seed", str(options.seed)]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, env={**os.environ}
            )

    def poll(self, limit: float) -> Fault | None:
        """Return an error if the process has died or hangs, and continue after the file."""
        number, since = CLOCK.unpack(self._clock.read_bytes())
        code = self._process.poll()
        if code == 0:
            self._go_on(self._end + (self._next - self._end) % self._options.workers)
            return None
        if code is None and time.monotonic() - since < limit:
            return None
        self._process.kill()
        _, said = self._process.communicate()
        what = "hang" if code is None else f"crash {code}"
        self._go_on(number + self._options.workers)
        return Fault(number, "?", what, said.decode(errors="replace")[-3000:])

    def _go_on(self, number: int) -> None:
        """Read the files from a number on, in a new process."""
        self._next = number
        self.done = self._next >= self._options.files
        if not self.done:
            self._launch()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def reached(self) -> int:
        """Return the number of the file that is being read."""
        number: int = CLOCK.unpack(self._clock.read_bytes())[0]
        return number

    def said(self) -> list[Any]:
        """Return the faults and counts of the processes."""
        lines = self._output.read_text().splitlines()
        return [json.loads(line) for line in lines if line[:1] + line[-1:] in {"[]", "{}"}]


def keep(seed: int, fault: Fault) -> None:
    """Write a file that causes an error, and the error."""
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = case(seed, fault.number)
    stem = f"{seed}-{fault.number}-{fault.reader.replace('?', 'worker')}"
    (KEPT / f"{stem}.pt").write_bytes(chosen.data)
    (KEPT / f"{stem}.txt").write_text(
        f"{chosen.name}: {chosen.how}\n{fault.what}\n{fault.text}\n", encoding="utf-8"
    )


def fuzz(options: argparse.Namespace) -> int:
    """Start the workers, watch them, and report."""
    start, faults = time.monotonic(), list[Fault]()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(options, number, Path(folder)) for number in range(options.workers)]
        while not all(worker.done for worker in workers):
            time.sleep(0.2)
            faults += [
                fault
                for worker in workers
                if not worker.done and (fault := worker.poll(options.limit)) is not None
            ]
            if options.seconds and time.monotonic() - start > options.seconds:
                break
        read = sum(1 + worker.reached() // options.workers for worker in workers)
        for worker in workers:
            worker.stop()
            for line in worker.said():
                if isinstance(line, dict):
                    counts.update(line)
                else:
                    faults.append(Fault(*line))
    for name, count in sorted(counts.items()):
        print(f"{count:8,} {name}")
    for (reader, what), count in Counter((f.reader, f.what) for f in faults).items():
        first = next(f for f in faults if (f.reader, f.what) == (reader, what))
        print(
            f"FAULT {count} x {reader}: {what}, first {first.number}: {first.text.strip()[-300:]}"
        )
    for fault in faults:
        keep(options.seed, fault)
    seconds = time.monotonic() - start
    print(f"{read:,} files of seed {options.seed} in {seconds:.0f} s, {len(faults)} faults")
    return 1 if faults else 0


def one(options: argparse.Namespace) -> int:
    """Read one file in this process, and print the outcome."""
    found: list[Fault] = []
    chosen = case(options.seed, options.only)
    print(chosen.name, chosen.how, len(chosen.data), "checked" if chosen.checked else "")
    counts = run(options.seed, range(options.only, options.only + 1), found.append)
    for fault in found:
        keep(options.seed, fault)
        print(fault.reader, fault.what, fault.text)
    print(dict(counts))
    return 1 if found else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000, help="how many files")
    parser.add_argument("--seed", type=int, default=0, help="which files")
    parser.add_argument("--seconds", type=float, default=0, help="end after so many")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for one file")
    parser.add_argument("--only", type=int, help="read this file alone")
    parser.add_argument("--clock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock is not None:
        return work(options)
    return fuzz(options) if options.only is None else one(options)


if __name__ == "__main__":
    sys.exit(main())
