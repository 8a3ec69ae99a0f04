"""What the code in an archive defines, read as text: nothing is parsed by the compiler."""

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final


@dataclass(frozen=True)
class ClassInfo:
    """A class of TorchScript.

    Args:
        name: Its qualified name in the archive.
        base: ``"Module"``, or what else it is: a NamedTuple, an Enum, an Interface; empty for a plain
            class.
        methods: Its methods.
        parameters: The names of its parameters.
        buffers: The names of its buffers.
    """

    name: str
    base: str
    methods: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


_CLASS: Final = re.compile(r"^class (\w+)(?:\(([\w.]*)\))?:", re.MULTILINE)
_METHOD: Final = re.compile(r"^  def (\w+)\(", re.MULTILINE)
_FUNCTION: Final = re.compile(r"^def (\w+)\(", re.MULTILINE)
_NAMES: Final = re.compile(r"^  __(parameters|buffers)__ = \[(.*)\]", re.MULTILINE)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')


def module_of(member: str) -> str:
    """Return the qualified name of a file of code: ``code/__torch__/a.py`` is ``__torch__.a``."""
    return member.removeprefix("code/").removesuffix(".py").replace("/", ".")


def classes_in(member: str, text: str) -> list[ClassInfo]:
    """Return the classes that a file of code defines, in their order."""
    heads = list(_CLASS.finditer(text))
    found: list[ClassInfo] = []
    for head, after in zip_longest(heads, heads[1:]):
        body = text[head.end() : after.start() if after else len(text)]
        # Functions may follow the class; their insides look like methods only by their depth.
        outside = _FUNCTION.search(body)
        body = body[: outside.start()] if outside else body
        names = {kind: tuple(_QUOTED.findall(line)) for kind, line in _NAMES.findall(body)}
        found.append(
            ClassInfo(
                f"{module_of(member)}.{head[1]}",
                head[2] or "",
                tuple(_METHOD.findall(body)),
                names.get("parameters", ()),
                names.get("buffers", ()),
            )
        )
    return found


def runs_at_load(member: str, text: str) -> list[str]:
    """Return what in a file of code runs while the archive is loaded.

    An object whose class has a ``__setstate__`` is restored by it. The name cannot be spelled in
    another way, so a file without it has no such method, however its lines are written.
    """
    if "__setstate__" not in text:
        return []
    known = [each.name for each in classes_in(member, text) if "__setstate__" in each.methods]
    return [f"{name}.__setstate__" for name in known] or [f"{module_of(member)}: __setstate__"]
