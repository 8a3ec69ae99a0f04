"""Write docs/mutation.md from docs/mutation.json: `python docs/render_mutation.py`.

`nox -s mutation` runs what it reports.
"""

import json
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutation.md"
FOUND = ROOT / "docs" / "mutation.json"
INTRODUCTION = """\
# Mutation tests

<!-- Rendered from docs/mutation.json by docs/render_mutation.py. -->

`nox -s mutation` changes the code of modkit in a copy and runs the tests: a change that no test notices is a gap.
"""


def planted(found: dict[str, Any]) -> str:
    """Return the section on bugs that were written by hand."""
    bugs = found["bugs"]
    caught = sum(bool(bug["caught by"]) for bug in bugs)
    lines = f"""\
## Planted bugs

{caught} of {len(bugs)} bugs are caught by `nox -s tests` ({found["date"]}, torch {found["torch"]}). There is at least one in
each mechanism of modules, and in each file of `averaging`, `files` and `jit`.

| file | bug | caught by |
|---|---|---|""".split("\n")
    lines += [
        f"| `{bug['file']}` | {bug['mechanism']} | {shown(bug['caught by'])} |" for bug in bugs
    ]
    return "\n".join(lines)


def shown(test: str) -> str:
    """Return the file and the name of a test without its parameters."""
    path, _, name = test.partition("::")
    name = name.partition("[")[0]
    return f"`{path.removeprefix('tests/')}` `{name}`" if test else "**missed**"


def sampled(found: dict[str, Any]) -> str:
    """Return the section on the sample of generated mutants."""
    lines = f"""\
## Generated mutants

Mutants that [mutmut](https://mutmut.readthedocs.io/) {found["mutmut"]} makes, a random sample of each part (seed
{found["seed"]}), against the tests of that part ({found["date"]}, torch {found["torch"]}).

| part | mutants | sample | caught | score |
|---|---|---|---|---|""".split("\n")
    for part in found["parts"]:
        caught = part["killed"] + part["timeout"]
        share = f"{caught / part['sample']:.0%}"
        lines.append(
            f"| `{part['name']}` | {part['mutants']:,} | {part['sample']} | {caught} | {share} |"
        )
    return "\n".join([*lines, "", found["survivors"]] if found.get("survivors") else lines)


def render() -> str:
    """Return the page."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    sections = [planted(found["planted"])]
    if "sample" in found:
        sections.append(sampled(found["sample"]))
    return "\n".join([INTRODUCTION, *(f"{section}\n" for section in sections)])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
