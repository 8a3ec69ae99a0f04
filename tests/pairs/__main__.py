"""Run all pairs: `nox -s pairs`; `-- --only applied --only DDP` for some of them.

A complete run without faults stores its counts for docs/test_evidence.md.
"""

import argparse
import faulthandler
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from tests.pairs import table


ROOT = Path(__file__).resolve().parents[2]
# Seconds after which a pair that hangs ends the run, with its stack.
LIMIT = 300


def main() -> int:
    """Run the pairs, print what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    names = set(parser.parse_args().only)
    chosen = [pair for pair in table.pairs() if names <= {*pair}]
    chosen = chosen or [pair for pair in table.pairs() if names & {*pair}]

    # Jobs of a shell in the background begin without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for feature, situation in chosen:
        together = tuple(
            name
            for name, place in chosen
            if place == situation and table.reason(name, place) is None
        )
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = table.outcome(feature, situation, Path(folder), together)
            except (Exception, pytest.fail.Exception):
                result = "wrong"
                sys.stdout.write(f"{feature} x {situation}\n{traceback.format_exc()}\n")
        counts[result] += 1
    faulthandler.cancel_dump_traceback_later()
    seconds = round(time.monotonic() - begin)
    sys.stdout.write(f"{len(chosen)} pairs in {seconds} s: {dict(counts)}\n")

    if not names and not counts["wrong"]:
        store({"pairs": len(chosen), **counts, "faults": len(table.FAULTS), "seconds": seconds})
    return bool(counts["wrong"])


def store(counts: dict[str, int]) -> None:
    """Store the counts, and write the pages again."""
    sys.path.insert(0, str(ROOT / "docs"))
    import render
    from _render.stored_results import write

    day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    sizes = {"features": len(table.FEATURES), "situations": len(table.SITUATIONS)}
    write("pairs", {"date": day, "torch": torch.__version__.split("+")[0], **sizes, **counts})
    render.write_pages()


if __name__ == "__main__":
    sys.exit(main())
