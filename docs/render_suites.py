"""The section on the test suites of third-party libraries; `nox -s suites` runs them."""

from typing import Any

from blocks import read, table


SIDES = ("torch", "whole", "user")
TEXT = """\
## Test suites of third-party libraries

Each suite runs three times: on torch; *whole*, with every `torch.nn`, `torch.jit` and `torch.optim.swa_utils` in
the library and its tests replaced by modkit's; and *user*, with only the tests rewritten, as in the code of a
modkit user. The outcome of each test is compared: passed, failed or skipped, and the class of the exception. A test
that differs is repeated three times on each side.

Run on {date} with torch {torch} by `nox -s suites`:

{suites}

{differing}

Libraries whose distribution has no tests are covered by probes. A probe calls public functions of the library with
models built on `torch.nn` and on `modkit.nn`, and compares the results bit by bit: {probes}.

<details>
<summary>What was not run</summary>

{left_out}

</details>"""


def totals(suites: dict[str, Any]) -> list[int]:
    """Return the sums of tests, of passed tests on each side, and of differing tests."""
    counts = [0] * 5
    for row in suites.values():
        counts = [a + b for a, b in zip(counts, numbers(row), strict=True)]
    return counts


def numbers(row: dict[str, Any]) -> list[int]:
    """Return these numbers for one library."""
    sides = row["sides"]
    passed = [sides[side].get("passed", 0) for side in SIDES]
    return [sum(sides["torch"].values()), *passed, len(row["differing"])]


def suites_table(suites: dict[str, Any]) -> str:
    """Return the table of suites, with a row of totals."""
    rows = [
        [f"{name} {row['version']}", *(f"{count:,}" for count in numbers(row))]
        for name, row in suites.items()
    ]
    rows.append([f"**{len(suites)} libraries**", *(f"{count:,}" for count in totals(suites))])
    headings = ["library", "tests", "passed on torch", "passed, whole", "passed, user", "differing"]
    return table(headings, rows, numbers=True)


def differing(suites: dict[str, Any]) -> str:
    """Return the differing tests, grouped by their cause."""
    causes: dict[str, list[str]] = {}
    for name, row in suites.items():
        for kind, note in (("differing", ""), ("unsteady", "differed in one run only: ")):
            for one in row[kind]:
                cause = f"{note}{one['cause'] or 'unexplained'}"
                causes.setdefault(cause, []).append(f"`{one['test'].rpartition('::')[2]}` ({name})")
    lines = [f"- {', '.join(tests)}: {cause}." for cause, tests in causes.items()]
    return "\n".join(["Differing tests, by cause:", "", *lines]) if lines else "No test differed."


def probes(rows: dict[str, Any]) -> str:
    """Name the libraries that were probed, with the counts."""
    counts = f"{sum(row['probes'] for row in rows.values())} probes"
    names = ", ".join(f"{name} {row['version']}" for name, row in rows.items())
    return f"{counts} of {names}; {sum(len(row['differing']) for row in rows.values())} differ"


def left_out(suites: dict[str, Any]) -> str:
    """Return what of each suite was not run, with the reasons."""
    lines = ["`tests/suites/libraries.py` names the files of accelerate and timm that run."]
    for name, row in suites.items():
        parts = [f"`{test}` ({reason})" for test, reason in row["left out"].items()]
        parts += [f"`{start}` (1 in {rate} run)" for start, rate in row["sample"].items()]
        lines += [f"{name}: {', '.join(parts)}."] * bool(parts)
    return "\n".join(f"- {line}" for line in lines)


def section() -> str:
    """Return the section in Markdown."""
    found = read("suites")
    suites = found["suites"]
    return TEXT.format(
        date=found["date"],
        torch=found["torch"],
        suites=suites_table(suites),
        differing=differing(suites),
        probes=probes(found["probes"]),
        left_out=left_out(suites),
    )
