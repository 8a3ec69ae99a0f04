"""The reasons in README.md, with the figures of the last runs."""

import re
from typing import Any

from _render.comparison import features
from _render.markdown import fill
from _render.stored_results import read
from _render.tested_with import totals


LIBRARIES = ["modkit", "torch", "timm", "diffusers", "ema-pytorch", "Lightning"]
FEATURES = [
    "updates match parameters by name",
    "a bfloat16 model is averaged precisely",
    "an update does not synchronize with the device",
    "several averages in one pass",
    "models under `fully_shard` (FSDP2)",
    "a swap copies nothing",
    "an error inside a swap restores the training weights",
    "a resumed run is bitwise identical",
]
REASONS = """\
**Nothing breaks.** `modkit.nn.Linear is torch.nn.Linear`, and so is every other name except `nn.Module`. The test suites
of {suites} third-party libraries run on both: [{tests:,} tests, {differ} differ](docs/tested_with.md), each with a
known cause. {cases} behaviors are compared bitwise; deliberate differences are [listed](docs/differences.md).

**Weight averaging that is hard to get wrong**, in your loop, in Lightning and transformers, under DDP and FSDP2. Each
cell is the [result of a test](docs/comparison.md):

**Checkpoints that fit.** Below a failed load stands its [cause](docs/load_matching.md): a prefix, a nested dict, renamed
layers, another number of classes. `load_matching()` loads the entries that fit and lists the others.

**Less overhead.** Loading is O(n), not O(n²): 3,000 sibling layers load in {siblings} instead of {siblings_torch}.
`load_checkpoint()` verifies checksums: it reads {fast} in {fast_ratio:.0%} of the time of `torch.load()`, and {slow} in
{slow_ratio:.0%}, or {slow_zlib:.0%} without the package zlib-ng.
`fast_inference` runs an MLP in {mlp:.0%} and an RL actor-critic in {critic:.0%} of torch's time, bitwise identical. [All
figures](docs/benchmarks.md), the slowest first."""


READERS = "load_checkpoint(), "


def name_of(row: dict[str, Any]) -> str:
    """Return what a row of the readers of files reads."""
    name: str = row["name"].removeprefix(READERS)
    return name


def milliseconds(seconds: float) -> str:
    """Return a time in ms or s, with two significant digits."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def blocks() -> dict[str, str]:
    """Return the block of the page."""
    rows: dict[str, Any] = {row["name"]: row for row in read("benchmarks")["rows"]}
    runs = read("modkit_compat")["behaviors"].values()
    found = read("library_suites")["suites"]
    tests, *_, differ = totals(found)
    readers = [row for name, row in rows.items() if name.startswith(READERS)]
    fast, *_, slow = sorted(readers, key=lambda row: row["ratio"])
    wide = rows["load_state_dict(), 3,000 siblings"]
    table = re.sub("^", "   ", features(LIBRARIES, FEATURES), flags=re.MULTILINE)
    figures = {
        "suites": len(found),
        "tests": tests,
        "differ": differ,
        "cases": max(run["areas"]["all"]["cases"] for run in runs),
        "siblings": milliseconds(wide["base"] * wide["ratio"]),
        "siblings_torch": milliseconds(wide["base"]),
        "fast": name_of(fast),
        "fast_ratio": fast["ratio"],
        "slow": name_of(slow),
        "slow_ratio": slow["ratio"],
        "slow_zlib": slow["others"]["zlib"],
        "mlp": rows["MLP 8-64-64-4"]["ratio"],
        "critic": rows["RL actor-critic"]["ratio"],
    }
    reasons = [
        fill(f"{number}. {reason}", "   ")
        for number, reason in enumerate(REASONS.format(**figures).split("\n\n"), 1)
    ]
    return {"reasons": "\n\n".join(["\n".join(reasons[:2]), table, "\n".join(reasons[2:])])}
