"""The code blocks of each page, saved as a script: what an interpreter prints as it ends counts, too."""

import re
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from tests.cases import for_each
from tests.processes import python


ROOT = Path(__file__).resolve().parents[3]


def blocks_of(page):
    """Return the Python blocks of a page, without those that need a library to be installed first.

    The loggers of these libraries write to stderr. Sessions of an interpreter only show values.
    """
    blocks = []
    collect = CodeBlockParser("python", lambda example: blocks.append(example.parsed))
    document = Sybil([collect, SkipParser()]).parse(page)
    document.namespace["missing"] = lambda *_: True
    for example in document:
        with suppress(SkipTest):
            example.evaluate()
    return [block for block in blocks if not block.startswith(">>>")]


def scripts():
    """Yield the scripts that a reader makes of a page: its first block, and all of them."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = blocks_of(page)
        name = page.relative_to(ROOT).with_suffix("").as_posix().replace("/", "_")
        if blocks:
            yield f"{name}.py", "\n".join(blocks)
        if len(blocks) > 1:
            yield f"{name}_first.py", blocks[0]


@for_each("name, code", scripts, ids=lambda script: script[0])
def test_a_page_runs_as_a_script(tmp_path, monkeypatch, name, code):
    """A script of a page succeeds in a process of its own, and prints nothing to stderr."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / name
    script.write_text(code, encoding="utf-8")

    found = python(script, finalize=True)

    # Torch 2.8 warns about itself where it writes a distributed checkpoint.
    printed = re.sub(r".*TypedStorage is deprecated.*\n.*\n", "", found.stderr)
    assert (found.returncode, printed) == (0, "")
