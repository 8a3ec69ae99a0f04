"""Time the updates and swaps of weight averages: modkit compared with torch, timm, diffusers and others.

    python -m benchmarks.averaging_peers                            # print the table: minutes
    python -m benchmarks.averaging_peers --json build/peers.json    # write every row as well
    python -m benchmarks.averaging_peers --seconds 0.2 --divide 8   # check that it runs
    python -m benchmarks.averaging_peers --device cuda              # on an accelerator

All run in this process, interleaved: a round times each contestant once, in random order. A time is the CPU
time of one thread. With warm caches, a sample is a loop of calls; with evicted caches, it is one call after 64
MB of other data were read and written. On an accelerator, times are those of a clock: "launched" is one call on
an idle device until it returns, and "finished" a loop of calls until the device has done them. A ratio is the
median over the rounds of modkit's time divided by the peer's. modkit is compared with peers that keep averages
of the same dtype, and parameters alone with parameters alone. Libraries that cannot be imported are named and
left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.averaging_contestants import CASES, OPERATIONS, PARAMETERS_ALONE, Action
from benchmarks.measure import Arm, Code, interleaved


class Measured(NamedTuple):
    """The times of one contestant, in milliseconds, one for each round."""

    case: str
    operation: str
    timed: str
    name: str
    times: list[float]

    def quartiles(self) -> list[float]:
        """Return the lower quartile, the median and the upper quartile."""
        return statistics.quantiles(self.times, n=4, method="inclusive")

    def shown(self) -> str:
        """Return the median and the quartiles as text."""
        low, middle, high = self.quartiles()
        return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def on_cpu(action: Action) -> Arm:
    """Return what takes the CPU time of calls."""
    return Code("action()", {"action": action})


def launched(action: Action) -> Arm:
    """Return what takes the time until a call returns that finds the accelerator idle."""

    def arm(number: int) -> float:
        elapsed = 0.0
        for _ in range(number):
            torch.accelerator.synchronize()
            start = time.perf_counter()
            action()
            elapsed += time.perf_counter() - start
        torch.accelerator.synchronize()
        return elapsed

    return arm


def finished(action: Action) -> Arm:
    """Return what takes the time until the accelerator has done all calls."""

    def arm(number: int) -> float:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            action()
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    return arm


ARMS: dict[str, Callable[[Action], Arm]] = {
    "warm": on_cpu,
    "evicted": on_cpu,
    "launched": launched,
    "finished": finished,
}


def actions_of(
    operation: str, model: nn.Module, dtype: torch.dtype, unavailable: set[str]
) -> dict[str, Action]:
    """Make the contestants that are installed and support averages of the dtype."""

    def prepared(name: str) -> Action | None:
        try:
            action = OPERATIONS[operation][name](model, dtype)
        except NotImplementedError:
            return None
        except (ImportError, RuntimeError, TypeError) as error:
            unavailable.add(f"{name} ({str(error).partition(chr(10))[0]})")
            return None
        for _ in range(3):
            action()
        return action

    actions = {name: prepared(name) for name in OPERATIONS[operation]}
    return {name: action for name, action in actions.items() if action is not None}


def measure(case: str, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Measured]:
    """Time both operations of all contestants, for a model, with averages in the dtype."""
    model = CASES[case](options.divide).to(options.device)
    label = f"{case}, averages in {str(dtype).removeprefix('torch.')}"
    for operation in OPERATIONS:
        actions = actions_of(operation, model, dtype, options.unavailable)
        for timed in ("warm", "evicted") if options.device == "cpu" else ("launched", "finished"):
            arms = {name: ARMS[timed](action) for name, action in actions.items()}
            found = interleaved(arms, options.seconds, cold=timed == "evicted")
            for name, times in found.items():
                yield Measured(label, operation, timed, name, [1e3 * one for one in times])


def ratios(found: list[Measured]) -> list[tuple[float, Measured, Measured]]:
    """Compare each contestant of modkit with each peer, the slowest of modkit first."""
    pairs = [
        (statistics.median(a / b for a, b in zip(ours.times, peer.times, strict=True)), ours, peer)
        for ours in found
        for peer in found
        if ours.name.startswith("modkit") and not peer.name.startswith("modkit")
        if ours[:3] == peer[:3]
        if (ours.name in PARAMETERS_ALONE) == (peer.name in PARAMETERS_ALONE)
    ]
    return sorted(pairs, key=lambda pair: -pair[0])


def report(found: list[Measured]) -> str:
    """Return the comparison as a table in Markdown."""
    lines = ["| case | operation | timed | modkit | ms | peer | ms | ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for ratio, ours, peer in ratios(found):
        cells = (*ours[:4], ours.shown(), peer.name, peer.shown(), f"{ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(device: str) -> str:
    """Name what was measured on."""
    if device == "cpu":
        return f"{platform.machine()}, torch {torch.__version__}, one thread"
    return f"{torch.get_device_module(device).get_device_name()}, torch {torch.__version__}"


def write_json(found: list[Measured], options: argparse.Namespace) -> None:
    """Write the quartiles of all contestants, and the machine."""
    rows = [
        {**one._asdict(), "times": len(one.times), "quartiles_ms": one.quartiles()} for one in found
    ]
    content = {
        "machine": machine(options.device),
        "unavailable": sorted(options.unavailable),
        "rows": rows,
    }
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each group of rows")
    parser.add_argument("--only", default="", help="a part of the names of the cases to measure")
    parser.add_argument("--divide", type=int, default=1, help="divide the widths, for a check")
    parser.add_argument("--device", default="cpu", help="where the models are")
    parser.add_argument("--json", type=Path, help="a file to write")
    options = parser.parse_args()
    options.unavailable = set()
    torch.set_num_threads(1)
    found: list[Measured] = []
    for case in (name for name in CASES if options.only in name):
        found += measure(case, torch.float32, options)
        if case.endswith("bf16"):
            found += measure(case, torch.bfloat16, options)
    print(report(found))
    for name in sorted(options.unavailable):
        print("left out:", name)
    if options.json:
        write_json(found, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
