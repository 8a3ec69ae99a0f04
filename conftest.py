"""Make every code block of README, docs and docstrings a test."""

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser


OPTIONS = ELLIPSIS | NORMALIZE_WHITESPACE

# The blocks of one page share a namespace and run from top to bottom.
pages = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=OPTIONS)], patterns=["*.md"])
docstrings = Sybil(parsers=[DocTestParser(optionflags=OPTIONS)], path="src", patterns=["*.py"])

pytest_collect_file = (pages + docstrings).pytest()
