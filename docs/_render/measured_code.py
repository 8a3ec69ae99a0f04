"""Says which code figures were measured on, and which of it has changed since.

A result stores a digest of the code of each part of modkit that it describes. Comments, docstrings and
blank lines do not count, so a better sentence does not make a table old.
"""

import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from _render.stored_results import DOCS, ROOT, read


SOURCE = ROOT / "src" / "modkit"
# Files that lie beside the folders.
FOUNDATION = "foundation"
# The parts of each result that has times. Commands and integrations are not measured.
AVERAGING = ("averaging", "optim")
DESCRIBED = {
    "benchmarks": (
        *AVERAGING,
        *("fast_inference", "files", "jit", "migrations", "models", "nn", FOUNDATION),
    ),
    "averaging_libraries": AVERAGING,
}


def digests(parts: Iterable[str]) -> dict[str, str]:
    """Return a digest of the code of each part."""
    return {part: _digest(part) for part in parts}


def _digest(part: str) -> str:
    found = hashlib.sha256()
    files = SOURCE.glob("*.py") if part == FOUNDATION else (SOURCE / part).rglob("*.py")
    for path in sorted(files):
        lines = _code_of(path.read_text(encoding="utf-8"))
        found.update(f"{path.name}\n{lines}\n".encode())
    return found.hexdigest()[:16]


@functools.cache
def _code_of(source: str) -> str:
    """Return the lines of code of a file. It takes seconds for all files, and notes ask for most twice."""
    lines: str = _count_lines().code_of(source)
    return lines


@functools.cache
def _count_lines() -> Any:
    spec = importlib.util.spec_from_file_location("count_lines", DOCS / "count_lines.py")
    assert spec is not None
    assert spec.loader is not None
    count_lines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(count_lines)
    return count_lines


def recorded(name: str) -> dict[str, str]:
    """Return the digests of the code that figures were measured on; {} for an old result."""
    results: Any = read(name)
    code: dict[str, str] = results.get("times", results).get("code", {})
    return code


def changed(name: str) -> list[str]:
    """Return the parts whose code has changed since figures were measured."""
    before = recorded(name)
    return [part for part, now in digests(DESCRIBED[name]).items() if before.get(part) != now]


def note(name: str) -> str:
    """Return a sentence on what has changed since figures were measured; "" if nothing has."""
    parts = changed(name)
    if not parts:
        return ""
    if len(parts) == len(DESCRIBED[name]):
        return "These figures are of an older version of the code."
    names = [f"`{part}`" for part in parts]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return f"The code of {listed} has changed since."


def outdated() -> list[str]:
    """Return the results that were measured on older code, each with the parts that have changed."""
    return [f"{name}: {', '.join(changed(name))}" for name in DESCRIBED if changed(name)]
