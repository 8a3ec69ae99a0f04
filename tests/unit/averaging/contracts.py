"""The arguments, results and exceptions that the docstrings of a class describe."""

import inspect
import re


def docstring(kind: type, name: str) -> str:
    """Return the docstring of a member; the constructor's is that of its class."""
    owner = kind if name == "__init__" else inspect.getattr_static(kind, name)
    return inspect.getdoc(owner) or ""


def section(kind: type, name: str, title: str) -> str:
    """Return one section of a docstring, or an empty text."""
    found = re.search(rf"^{title}:\n((?:[ ]{{4}}.*\n?|\n)+)", docstring(kind, name), re.MULTILINE)
    return found[1] if found else ""


def entries(kind: type, name: str, title: str) -> set[str]:
    """Return the names that a section describes."""
    heads = re.findall(r"^ {4}([*\w]+(?:, [*\w]+)*):", section(kind, name, title), re.MULTILINE)
    return {entry.strip("*") for head in heads for entry in head.split(", ")}
