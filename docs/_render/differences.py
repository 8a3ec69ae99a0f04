"""The page of differences, from tests/divergences.py: edit the table there."""

import re

from _render.markdown import table
from tests.divergences import ROWS, Divergence


TEXT = """\
# Differences from torch

What a program can observe to be different with modkit. What is not on this page is as in torch: the behavior tests run
on both, and any other difference is a bug. [`modkit compat`](prove_it.md) checks this with your release of torch.

The rows on modules hold for classes derived from `modkit.nn.Module`. The layers of `modkit.nn` are torch's own
objects. A class such as `class Linear(torch.nn.Linear, modkit.nn.Module)` has torch's `forward` and, as a module,
the behavior below."""
FIXES = """\
## Bugs of torch that modkit fixes

Fixing these in torch would break code that depends on them, or has not happened yet."""
LIMITS = """\
## Limitations of modkit

Torch has these behaviors, and modkit does not."""
LIGHTZERO = """\
## LightZero

Bugs of [LightZero](https://github.com/opendilab/LightZero)'s networks that [`modkit.models`](models.md) fixes."""
TESTS = """\
## Tests of the differences

For contributors: each test is a strict xfail on the side that behaves otherwise, so a difference that is gone fails.

<details>
<summary>The tests of each difference</summary>

{}

</details>"""
# The first pattern that occurs in the path of a row's first test decides its section.
AREAS = {
    "TorchScript": r"/jit/|unit/jit",
    "Weight averaging": r"averag|swa_",
    "Hooks": r"hook",
    "Saving and loading": r"load|state_dict",
    "Modules": r"",
}


def area(row: Divergence) -> str:
    """Return the section of a row."""
    return next(name for name, pattern in AREAS.items() if re.search(pattern, row.tests[0]))


def sides(row: Divergence) -> tuple[str, str]:
    """Return what torch does, with the releases and issues, and what modkit does."""
    torch, _, modkit = row.reason.partition(" | ")
    releases = {"torch": row.torch, "Python ": row.python}
    notes = [f"{name}{has_it}" for name, has_it in releases.items() if has_it]
    if row.upstream:
        notes.append(link(row.upstream))
    remarks = ", ".join(note for note in notes if note)
    return torch + (f" ({remarks})" if remarks else ""), modkit


def link(upstream: str) -> str:
    """Return the addresses in a text as links with the names of their repositories."""
    text = re.sub(r"no upstream issue(; )?", "", upstream)
    pattern = r"https://github\.com/\S+?/(\S+?)/(?:issues|pull)/(\d+)"
    return re.sub(pattern, r"[\1#\2](\g<0>)", text)


def tests(row: Divergence) -> str:
    """Return the names of the tests of a row."""
    names = [test.removeprefix("tests/") for test in row.tests]
    names += [f"modkit compat: {row.case}"] * bool(row.case)
    return "<br>".join(f"`{name}`" for name in names)


def sections() -> list[tuple[str, str, list[Divergence]]]:
    """Return the heading of each table, the name of its first side, and its rows."""
    limits, fixes, lightzero = (
        [row for row in ROWS if row.fails_on == side] for side in ("modkit", "torch", "lightzero")
    )
    tables_of_fixes = [
        (f"### {name}", "torch", [row for row in fixes if area(row) == name])
        for name in reversed(AREAS)
    ]
    return [
        (LIMITS, "torch", limits),
        (FIXES, "torch", []),
        *tables_of_fixes,
        (LIGHTZERO, "LightZero", lightzero),
    ]


def page() -> str:
    """Return the page in Markdown."""
    parts = [TEXT]
    shown: list[Divergence] = []
    for heading, side, rows in sections():
        parts.append(heading)
        if rows:
            parts.append(table([side, "modkit"], map(sides, rows)))
        shown += rows
    lines = [(row.reason.partition(" | ")[0], tests(row)) for row in shown]
    return "\n\n".join([*parts, TESTS.format(table(["difference", "tests"], lines))])
