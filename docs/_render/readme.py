"""The figures in README.md, from the results of the last runs."""

from statistics import mean, stdev
from typing import Any

import modkit
from _render.comparison import MODELS, medians
from _render.ema_losses import RAW
from _render.markdown import fill, table
from _render.measured_code import note
from _render.stored_results import read, release
from _render.tested_with import NOT_RUN, totals


REASONS = """\
**Averages that are hard to get wrong.** Matched by name, in float32 for bf16 models, swapped in without a copy,
resumed bitwise; in your loop, Lightning and transformers, under DDP and FSDP2.

**Checkpoints that fit, or say why not.** Atomic writes, verified reads, O(n) loading: 3,000 layers in {siblings} instead
of {siblings_torch}, and at worst {worst} of torch's time.

**Nothing breaks.** `modkit.nn.Linear is torch.nn.Linear`. Of {tests:,} tests of {suites} third-party libraries,
[{differ} differ](docs/tested_with.md), each with a known cause. Three of the libraries, pyro, torchrl and optimum-quanto, cannot
have `torch.nn` replaced in their own code; code that uses them can."""
GAIN = """\
On digits, at a constant learning rate, the final test loss of three runs is {digits_raw} for the training weights, and
{digits} for their average with a decay of 0.99. An average needs a
window that fits the run: for a small GPT-2 after only 600 steps a decay of 0.9 takes the loss from {text_raw} to
{text_narrow}, and 0.99 is worse, {text}. [Which decay?](docs/averaging.md#choosing-a-decay)"""
STATUS = """\
Version {version}, beta, not released. [Tested with](docs/tested_with.md) torch {torch} and Python {python} on Linux, and on
{devices}, in part on {partly}; {missing} were not run. Until 1.0 a minor version may break code, and the [changelog](CHANGELOG.md) says
where."""
# Rows of the table of times: title, table of results, beginnings of the names of its rows.
TIMES = {
    "[`load_state_dict()`](docs/state_dict.md)": ("operations", "load_state_dict("),
    "[`load_checkpoint()`](docs/files.md), with every checksum verified": (
        "files",
        "load_checkpoint(",
    ),
    "[`fast_inference()`](docs/fast_inference.md), batch size 1": ("inference", ""),
    "[`jit.load()`](docs/jit.md), with every checksum verified": ("files", "jit.load("),
}
UPDATE = "[`EMA.update()`](docs/averaging.md) / `AveragedModel` of torch"


def milliseconds(seconds: float) -> str:
    """Return a time in ms or s, with two significant digits."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def extremes(kind: str, start: str) -> tuple[str, str]:
    """Return the fastest and the slowest of some rows, which compare with the same function of torch."""
    rows = [
        row
        for row in read("benchmarks")["rows"]
        if row["table"] == kind and row["name"].startswith(start) and " / " not in row["name"]
    ]
    ordered = sorted(rows, key=lambda row: row["ratio"])
    return cell(ordered[0], start), cell(ordered[-1], start)


def cell(row: dict[str, Any], start: str) -> str:
    """Return the ratio of a row, what it measures, and the ratio without zlib-ng."""
    name = row["name"].removeprefix(start).removeprefix(")").strip(", ").replace("), ", ", ")
    zlib = row["others"].get("zlib")
    without = f", or {zlib:.2f} without zlib-ng" if zlib else ""
    return f"{row['ratio']:.2f}{without}: {name}"


def updates() -> tuple[str, str]:
    """Return the smallest and the largest ratio of an update of `EMA` to one of torch's `AveragedModel`."""
    times = medians("update")
    ratios = [
        (times[model, "modkit.EMA"] / times[model, "torch AveragedModel"], title)
        for model, title in MODELS.items()
    ]
    low, high = min(ratios), max(ratios)
    return f"{low[0]:.2f}: {low[1]}", f"{high[0]:.2f}: {high[1]}"


def others() -> str:
    """Return the slowest of the operations of modules that are not in another row."""
    rows = [
        row
        for row in read("benchmarks")["rows"]
        if row["table"] == "operations" and " / " not in row["name"]
    ]
    slowest = max(rows, key=lambda row: row["ratio"])
    return f"{slowest['ratio']:.2f}: {slowest['name']}"


def reasons() -> str:
    """Return the reasons, numbered."""
    rows = {row["name"]: row for row in read("benchmarks")["rows"]}
    suites = read("library_suites")["suites"]
    tests, *_, differ = totals(suites)
    wide = rows["load_state_dict(), 3,000 siblings"]
    text = REASONS.format(
        siblings=milliseconds(wide["base"] * wide["ratio"]),
        siblings_torch=milliseconds(wide["base"]),
        worst=extremes("operations", "load_state_dict(")[1].partition(":")[0],
        tests=tests,
        suites=len(suites),
        differ=differ,
    )
    return "\n".join(
        fill(f"{number}. {reason}", "   ") for number, reason in enumerate(text.split("\n\n"), 1)
    )


def gain() -> str:
    """Return what an average gains, and where it does not."""
    runs = read("ema_losses")

    def final(task: str, name: str) -> str:
        losses = [curves[name][-1] for curves in runs[task]]
        return f"{mean(losses):.3f} ± {stdev(losses):.3f}"

    return fill(
        GAIN.format(
            digits_raw=final("digits", RAW),
            digits=final("digits", "EMA 0.99"),
            text_raw=final("text", RAW),
            text_narrow=final("text", "EMA 0.9"),
            text=final("text", "EMA 0.99"),
        )
    )


def times() -> str:
    """Return the table of times, each with its fastest and its slowest row."""
    lines = [[title, *extremes(*selection)] for title, selection in TIMES.items()]
    lines.append([UPDATE, *updates()])
    lines.append(["everything else a module does", "", others()])
    shown = table(["time relative to torch", "fastest row", "slowest row"], lines)
    return "\n\n".join([shown, *filter(None, [note("benchmarks")])])


def listed(words: list[str]) -> str:
    """Return words with commas, and `and` before the last one."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def status() -> str:
    """Return the version, and what the tests ran on."""
    runs = read("test_runs")
    torch = sorted({release(run["torch"])[:2] for run in runs["tests"]})
    python = sorted({release(run["python"])[:2] for run in runs["tests"]})
    tested = [run["device"] for run in runs["devices"]]
    return fill(
        STATUS.format(
            version=modkit.__version__,
            torch=listed([f"{major}.{minor}" for major, minor in torch]),
            python=f"3.{python[0][1]} to 3.{python[-1][1]}",
            devices=listed(["CPU", *tested]),
            missing=listed(
                [d for d, note in NOT_RUN.items() if note == "not run" and d not in tested]
            ),
            partly=listed([d for d, note in NOT_RUN.items() if note != "not run"]),
        )
    )


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    return {"reasons": reasons(), "gain": gain(), "times": times(), "status": status()}
