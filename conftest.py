"""Make every code block of README, docs and docstrings a test."""

import importlib.util
import os
import tempfile
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser


OPTIONS = ELLIPSIS | NORMALIZE_WHITESPACE


def missing(*packages: str) -> bool:
    """Return True if one of the packages is not installed, to skip blocks that need it."""
    return any(importlib.util.find_spec(package) is None for package in packages)


def set_up(namespace: dict[str, Any]) -> None:
    """Run a page in an empty folder, and give it what its comments about skipping call."""
    namespace["missing"] = missing
    # Blocks that compile for half a minute run in CI.
    namespace["in_ci"] = "CI" in os.environ
    namespace["previous folder"] = Path.cwd()
    namespace["folder of the page"] = tempfile.TemporaryDirectory()
    # The temporary files of the page go with the folder.
    tempfile.tempdir = namespace["folder of the page"].name
    os.chdir(tempfile.tempdir)


def tear_down(namespace: dict[str, Any]) -> None:
    """Return to the folder of the tests, and delete that of the page."""
    os.chdir(namespace["previous folder"])
    tempfile.tempdir = None
    namespace["folder of the page"].cleanup()


# The blocks of one page share a namespace and run from top to bottom. A comment in front of a block
# skips it: <!--- skip: next if(missing("timm"), reason="needs timm") -->
pages = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=OPTIONS), SkipParser()],
    patterns=["*.md"],
    setup=set_up,
    teardown=tear_down,
)
# Examples that write files find a folder in `tmp_path`.
docstrings = Sybil(
    parsers=[DocTestParser(optionflags=OPTIONS)],
    path="src",
    patterns=["*.py"],
    fixtures=["tmp_path"],
)

pytest_collect_file = (pages + docstrings).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes an item of each case of `for_each`."""
    parser.addoption("--unfold", action="store_true", help="one item for each case of for_each")


def pytest_configure(config: pytest.Config) -> None:
    """Tell `for_each` before the tests are imported."""
    if config.getoption("--unfold"):
        importlib.import_module("tests.cases").unfolded = True  # type: ignore[attr-defined]
