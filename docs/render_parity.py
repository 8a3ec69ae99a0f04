"""The page of differences, from tests/divergences.py: edit the table there."""

import re
from collections.abc import Iterable

from blocks import table

from tests.divergences import ROWS, Divergence


TEXT = """\
# Differences from torch

The behavior tests run on torch and on modkit, and must pass on both. The tests of this page are the only
exceptions: each is a strict xfail on one of the two. A difference that is not listed is a bug. `modkit compat`
requires exactly these outcomes with the installed torch.

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
    """Return what torch does, and what modkit does."""
    torch, _, modkit = row.reason.partition(" | ")
    return torch + (f" (torch{row.torch})" if row.torch else ""), modkit


def link(upstream: str) -> str:
    """Return the addresses in a text as links with the names of their repositories."""
    text = re.sub(r"no upstream issue(; )?", "", upstream)
    pattern = r"https://github\.com/\S+?/(\S+?)/(?:issues|pull)/(\d+)"
    return re.sub(pattern, r"[\1#\2](\g<0>)", text)


def tests(row: Divergence) -> str:
    """Return the names of the tests, folded."""
    names = [test.removeprefix("tests/") for test in row.tests]
    names += [f"modkit compat: {row.case}"] * bool(row.case)
    shown = "<br>".join(f"<code>{name}</code>" for name in names)
    return f"<details><summary>{len(names)}</summary>{shown}</details>"


def rows(found: Iterable[Divergence], first: str = "torch") -> str:
    """Return a table of differences."""
    lines = [[*sides(row), link(row.upstream), tests(row)] for row in found]
    return table([first, "modkit", "issue", "tests"], lines)


def section() -> str:
    """Return the page in Markdown."""
    on = {side: [row for row in ROWS if row.fails_on == side] for side in ("torch", "modkit")}
    parts = [TEXT, LIMITS, rows(on["modkit"]), FIXES]
    for name in reversed(AREAS):
        parts += [f"### {name}", rows(row for row in on["torch"] if area(row) == name)]
    lightzero = (row for row in ROWS if row.fails_on == "lightzero")
    return "\n\n".join([*parts, LIGHTZERO, rows(lightzero, "LightZero")])


if __name__ == "__main__":
    from render import write_pages

    write_pages()
