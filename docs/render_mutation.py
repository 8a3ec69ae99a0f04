"""The section on mutation tests; `nox -s mutation` runs them."""

from collections import Counter

from blocks import read, table


TEXT = """\
## Planted bugs

`nox -s mutation` changes the code of modkit in a copy and runs the tests. A change that no test catches is a gap.
`nox -s tests` catches {caught} of {bugs} planted bugs ({date}, torch {torch}). There is at least one in each mechanism
of modules, and in each file of `averaging`, `files` and `jit`; `docs/mutation.json` names each bug and the test.

{rows}"""
SAMPLE = """\
A random sample (seed {seed}) of the mutants of [mutmut](https://mutmut.readthedocs.io/) {mutmut}, against the tests of
each part ({date}, torch {torch}):

{rows}"""


def planted() -> str:
    """Return the part on bugs that were written by hand."""
    found = read("mutation")["planted"]
    folders = Counter(bug["file"].partition("/")[0] for bug in found["bugs"])
    caught = Counter(bug["file"].partition("/")[0] for bug in found["bugs"] if bug["caught by"])
    rows = ([f"`{name}`", count, caught[name]] for name, count in folders.items())
    return TEXT.format(
        caught=caught.total(),
        bugs=folders.total(),
        date=found["date"],
        torch=found["torch"],
        rows=table(["folder", "bugs", "caught"], rows, numbers=True),
    )


def sampled() -> str:
    """Return the part on the sample of generated mutants."""
    found = read("mutation").get("sample")
    if not found:
        return ""
    rows = []
    for part in found["parts"]:
        caught = part["killed"] + part["timeout"]
        numbers = [f"{part['mutants']:,}", part["sample"], caught, f"{caught / part['sample']:.0%}"]
        rows.append([f"`{part['name']}`", *numbers])
    shown = table(["part", "mutants", "sample", "caught", "score"], rows, numbers=True)
    return SAMPLE.format(**{**found, "rows": shown}) + f"\n\n{found.get('survivors', '')}"


def section() -> str:
    """Return the section in Markdown."""
    return f"{planted()}\n\n{sampled()}"


if __name__ == "__main__":
    from render import write_pages

    write_pages()
