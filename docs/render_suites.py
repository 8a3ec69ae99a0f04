"""Write docs/suites.md, the suites of third-party libraries on torch and modkit, from docs/suites.json.

`nox -s suites` runs them, and writes both files.
"""

import json
from pathlib import Path
from typing import Any


PAGE = Path(__file__).with_name("suites.md")
FOUND = Path(__file__).with_name("suites.json")
NOTICE = "<!-- from docs/suites.json, by docs/render_suites.py -->"
HEAD = """\
# Suites of third-party libraries

Each suite runs three times: on torch; **whole**, with every `torch.nn`, `torch.jit` and
`torch.optim.swa_utils` in the library and its tests rewritten to modkit's; and **user**, with only the
tests rewritten and the library untouched, which is what a user of modkit has. Outcomes are compared test
by test: passed, failed or skipped, and the class of the exception. What differs runs three more times on
each side.

Where Pyro is installed, gpytorch's priors have Pyro's metaclass, which a class with modkit's `Module`
among its bases cannot have ([differences](parity.md)); gpytorch therefore runs without it.
"""
PROBES = """\
## Libraries without tests in their distribution

Probes call their public functions with a user's modules, built on `torch.nn` and on `modkit.nn`, and
compare the results: tensors bit by bit, modules by text and state, exceptions by type and text.
"""


def table(suites: dict[str, Any]) -> str:
    """Return the table of suites in Markdown, with a row of totals."""
    lines = [
        "| library | tests | passed on torch | passed, whole | passed, user | differing |",
        "|---|---|---|---|---|---|",
    ]
    totals = [0] * 5
    for name, row in suites.items():
        sides = row["sides"]
        passed = [sides[side].get("passed", 0) for side in ("torch", "whole", "user")]
        counts = [sum(sides["torch"].values()), *passed, len(row["differing"])]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        lines.append(f"| {name} {row['version']} | {cells(counts)} |")
    lines.append(f"| **{len(suites)} libraries** | {cells(totals)} |")
    return "\n".join(lines)


def cells(counts: list[int]) -> str:
    """Return cells with numbers."""
    return " | ".join(f"{count:,}" for count in counts)


def differences(suites: dict[str, Any], kind: str, title: str) -> str:
    """Return one line for each test that did not end alike on every side at first."""
    lines = [
        f"- {name}, `{one['test']}`: {one['cause'] or 'unexplained'}"
        for name, row in suites.items()
        for one in row[kind]
    ]
    return "\n".join([f"## {title}", "", *lines]) if lines else ""


def left_out(suites: dict[str, Any]) -> str:
    """Return what of the suites was not run, and why."""
    lines = [
        f"- {name}, `{test}`: {reason}"
        for name, row in suites.items()
        for test, reason in {
            **row["left out"],
            **{start: f"one test in {rate} was run" for start, rate in row["sample"].items()},
        }.items()
    ]
    files = "Of accelerate, peft and timm, the files run that `tests/suites/libraries.py` names."
    return "\n".join(["## Left out", "", files, "", *lines])


def probes(rows: dict[str, Any]) -> str:
    """Return the table of probes in Markdown."""
    lines = ["| library | probes | differing |", "|---|---|---|"]
    lines += [
        f"| {name} {row['version']} | {row['probes']} | {len(row['differing'])} |"
        for name, row in rows.items()
    ]
    return f"{PROBES}\n" + "\n".join(lines)


def render() -> str:
    """Return the page."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    ran = f"Run on {found['date']} with torch {found['torch']} by `nox -s suites`."
    suites = found["suites"]
    parts = (
        *(NOTICE, HEAD, ran, table(suites)),
        differences(suites, "differing", "Differing tests"),
        differences(suites, "unsteady", "Tests that differed in one run only"),
        *(probes(found["probes"]), left_out(suites)),
    )
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
