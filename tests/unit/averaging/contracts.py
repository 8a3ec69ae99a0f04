"""The arguments, results and exceptions that the docstrings of a class describe."""

import inspect
import re
from typing import Any


def public_members(kind: type) -> dict[str, Any]:
    """Return the methods and properties that a class of modkit defines, its constructor among them."""
    classes = [base for base in reversed(kind.__mro__) if base.__module__.startswith("modkit")]
    defined = {name: member for base in classes for name, member in vars(base).items()}
    members = {
        name: member
        for name, member in defined.items()
        # An alias has the docstring of the method.
        if isinstance(member, property) or getattr(member, "__name__", None) == name
        if name[0] != "_"
    }
    return {"__init__": kind.__init__, **members}


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
