"""Time and memory that readers take for files made to take much of both.

python -m tests.unit.files.amplification             # the table of docs/files.md
python -m tests.unit.files.amplification --size 1    # with files of 1 MB
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.processes import python
from tests.unit.files.hostile import (
    called,
    checkpoint,
    named,
    script,
    text,
)
from tests.unit.files.raw_zip import replaced


def within(opening: bytes, repeated: bytes, closing: bytes, size: int) -> bytes:
    """Return a pickle of about a size that repeats some instructions."""
    return b"\x80\x02" + opening + repeated * (size // len(repeated)) + closing + b"."


ORDERED_DICT = named("collections", "OrderedDict") + b"q\1"
# A set, which torch reads and the unpickler of modkit does not, keeps the file from the fast path.
WITH_SET = b"](" + called(named("__builtin__", "set"), b"]")
PICKLES: dict[str, Callable[[int], bytes]] = {
    "empty lists": lambda n: within(b"](", b"]", b"e", n),
    "empty lists, memoized": lambda n: within(b"](", b"]r\x01\x01\0\0", b"e", n),
    "empty dicts": lambda n: within(b"](", b"}", b"e", n),
    "dicts of one entry": lambda n: within(b"](", b"}NNs", b"e", n),
    "lists within lists": lambda n: within(b"](", b"]]a", b"e", n),
    "tuples": lambda n: within(b"](", b"N\x85", b"e", n),
    "ordered dicts": lambda n: within(ORDERED_DICT + b"](", b"h\1)R", b"e", n),
    "sets": lambda n: within(b"](", b"\x8f", b"e", n),
    "marks": lambda n: within(b"", b"(", b"", n),
    "empty lists beside a set": lambda n: within(WITH_SET, b"]", b"e", n),
    "memoized text beside a set": lambda n: within(
        WITH_SET[:2] + text("x") + b"q\1" + WITH_SET[2:], b"h\1", b"e", n
    ),
    "numbers": lambda n: within(b"](", b"M\1\1", b"e", n),
    "constants": lambda n: within(b"](", b"\x88", b"e", n),
    "constants beside a set": lambda n: within(WITH_SET, b"\x88", b"e", n),
    "dict of numbers": lambda n: (
        b"\x80\x02}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(n // 6)) + b"u."
    ),
}


def pickled(case: str) -> Callable[[int], dict[str, bytes]]:
    """Return a function of the size that returns a checkpoint with this pickle."""
    return lambda n: {"file.pt": replaced(checkpoint(), {"data.pkl": PICKLES[case](n)})}


def constants(n: int) -> dict[str, bytes]:
    """Return a TorchScript archive with many constants."""
    pickle = within(b"(", b"]", b"t", n)
    return {"script.pt": replaced(script(), {"constants.pkl": pickle})}


FILES: dict[str, Callable[[int], dict[str, bytes]]] = {
    **{name: pickled(name) for name in PICKLES},
    "constants of TorchScript": constants,
}

CHILD = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, modkit
from modkit import files, jit
from pathlib import Path

who, path, small = sys.argv[1:]
def status(name):
    line = next(x for x in open("/proc/self/status") if x.startswith(name))
    return int(line.split()[1]) << 10

def inspect(path):
    return files.inspect(path)

readers = {
    "modkit .pt": modkit.load_checkpoint,
    "torch .pt": lambda p: torch.load(p, weights_only=True),
    "modkit script.pt": jit.load,
    "torch script.pt": torch.jit.load,
    "inspect .pt": inspect,
    "inspect script.pt": inspect,
}
name = path.rpartition("/")[2]
kind = "script.pt" if name == "script.pt" else ".pt"
modkit.load_checkpoint(small)
torch.load(small, weights_only=True)
try:
    inspect(small)
    inspect(path + ".none")
except Exception:
    pass
open("/proc/self/clear_refs", "w").write("5")
before, start = status("VmRSS"), time.process_time()
try:
    found = readers[f"{who} {kind}"](path)
    said = "read"
except Exception as error:
    said = f"{type(error).__name__}: {str(error)[-150:]}"
taken, memory = time.process_time() - start, status("VmHWM") - before
print(json.dumps([taken, memory, said]))
"""


class Cost(NamedTuple):
    """Figures of a reader: seconds of CPU time, bytes of memory at the peak, and the outcome."""

    seconds: float
    memory: int
    outcome: str


def cost(who: str, case: str, size: int, folder: Path) -> Cost:
    """Read a file in a process of its own: ``who`` is modkit, torch or inspect."""
    contents = FILES[case](size)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    small = folder / "small.bin"
    small.write_bytes(checkpoint())
    done = python(CHILD, who, folder / next(iter(contents)), small)
    if done.returncode:
        raise AssertionError(f"{who}, {case}: {done.returncode}\n{done.stderr}")
    return Cost(*json.loads(done.stdout))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=5, help="megabytes of a file")
    parser.add_argument("--only", default="", help="word in the name of a file")
    options = parser.parse_args()
    size = int(options.size * 1_000_000)
    for case in FILES:
        if options.only not in case:
            continue
        cells = []
        for who in ("modkit", "inspect", "torch"):
            with tempfile.TemporaryDirectory() as folder:
                found = cost(who, case, size, Path(folder))
            cells.append(
                f"{found.seconds:.2f} s, {found.memory / size:.1f}x ({found.outcome[:60]})"
            )
        sys.stdout.write(f"| {case} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
