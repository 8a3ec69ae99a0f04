"""The code blocks of each page, saved as a script: what an interpreter prints as it ends counts, too."""

import re
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

import pytest
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
    document.namespace["in_ci"] = False
    for example in document:
        with suppress(SkipTest):
            example.evaluate()
    return [block for block in blocks if not block.startswith(">>>")]


def pages():
    """Yield the name and the blocks of each page that has some."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if blocks := blocks_of(page):
            yield page.relative_to(ROOT).with_suffix("").as_posix().replace("/", "_"), blocks


def assert_quiet(script, *arguments):
    """Assert that a script succeeds in a process of its own, and prints nothing to stderr."""
    found = python(script, *arguments, finalize=True)

    # Torch 2.8 warns about itself where it writes a distributed checkpoint, and each torch for CUDA
    # where there are its compilers, but no GPU.
    printed = re.sub(r".*TypedStorage is deprecated.*\n.*\n", "", found.stderr)
    printed = re.sub(r".*No CUDA runtime is found.*\n", "", printed)
    assert (found.returncode, printed) == (0, "")


@pytest.mark.slow
@for_each("name, blocks", pages, ids=lambda page: page[0])
def test_a_page_runs_as_a_script(tmp_path, monkeypatch, name, blocks):
    """All blocks of a page are a script."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text("\n".join(blocks), encoding="utf-8")

    assert_quiet(script)


# Modules that live until the interpreter ends, as the main module of a script does.
EACH = """
import os, pathlib, sys, types

for path in map(pathlib.Path, sys.argv[1:]):
    os.chdir(path.parent)
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))
"""


def test_the_first_block_of_a_page_is_a_script(tmp_path):
    """The blocks with which readers begin do not need the later ones, not even to end."""
    scripts = []
    for name, blocks in pages():
        folder = tmp_path / name
        folder.mkdir()
        scripts.append(folder / f"{name}_first.py")
        scripts[-1].write_text(blocks[0], encoding="utf-8")

    assert_quiet(EACH, *scripts)
