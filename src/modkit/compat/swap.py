"""``swap_source``: make Python source use modkit where it uses ``torch.nn``."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple


ROOTS = ("torch.nn", "torch.jit", "torch.optim.swa_utils")


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def swap_source(source: str) -> str:
    """Return the source with modkit in place of ``torch.nn``, ``torch.jit`` and ``swa_utils``.

    Imports and attribute chains are rewritten, so ``import torch.nn as nn`` becomes
    ``import modkit.nn as nn``, and ``torch.nn.Linear`` becomes ``modkit.nn.Linear``. Every statement
    stays on its line. A name that modkit lacks stays torch's, and so does what strings contain, such
    as the target of ``mock.patch``; before Python 3.12, that holds for f-strings too.

    Args:
        source: Python source of one file, with newline characters between lines.

    Returns:
        The rewritten source. It is ``source`` if nothing in it is to be rewritten.

    Raises:
        SyntaxError: If the source cannot be parsed.

    Example:
        >>> print(swap_source("from torch import nn, optim"))
        from torch import optim; from modkit import nn
    """
    tree = ast.parse(source)
    text = source.encode()
    lines = _Lines(text)
    edits = {*_edits_of_imports(tree, lines)}
    needed: set[str] = set()
    for name, root, replacement in _uses(tree):
        needed.add(_ours(root))
        edits.add(_Edit(*lines.span(name), replacement))
    if needed:
        edits.add(lines.import_at_top(tree, f"import {', '.join(sorted(needed))}"))
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text.encode() + text[edit.end :]
    return text.decode()


def _ours(dotted: str) -> str:
    return "modkit" + dotted.removeprefix("torch")


def _root_of(dotted: str) -> str | None:
    """Return the namespace that a dotted name of torch is in, if modkit has that name."""
    for root in ROOTS:
        if dotted == root:
            return root
        if dotted.startswith(f"{root}."):
            name = dotted.removeprefix(f"{root}.").partition(".")[0]
            ours = importlib.import_module(_ours(root))
            known = name == "*" or hasattr(ours, name)
            is_package = hasattr(ours, "__path__")
            if known or (is_package and importlib.util.find_spec(f"{ours.__name__}.{name}")):
                return root
    return None


class _Lines:
    """The text of a file by line and column, as syntax trees count them."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.starts = [0]
        for line in text.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        """Return where the text of the node starts and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def import_at_top(self, tree: ast.Module, statement: str) -> _Edit:
        """Return the edit that imports below the docstring and ``__future__``."""
        before = 0
        if ast.get_docstring(tree, clean=False) is not None:
            before = 1
        while _is_future(tree.body[before]):
            before += 1
        if before:
            _, end = self.span(tree.body[before - 1])
            return _Edit(end, end, f"; {statement}")
        first = tree.body[0]
        start, _ = self.span(first)
        if not hasattr(first, "body") and not hasattr(first, "cases"):
            return _Edit(start, start, f"{statement}; ")
        # In front of a compound statement, on the line above it, which is blank or a comment.
        decorators = getattr(first, "decorator_list", [])
        line = min(node.lineno for node in [first, *decorators])
        if line > 1:
            return _Edit(self.starts[line - 2], self.starts[line - 2], f"{statement}  ")
        return _Edit(0, 0, f"{statement}\n")


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that have a right position: before Python 3.12, those in f-strings have not."""
    yield node
    for child in ast.iter_child_nodes(node):
        if sys.version_info >= (3, 12) or not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _edits_of_imports(tree: ast.Module, lines: _Lines) -> Iterator[_Edit]:
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import torch.nn` binds `torch`, and is needed for what else it is used for.
                if alias.asname is not None and _root_of(alias.name):
                    start, _ = lines.span(alias)
                    yield _Edit(start, start + len("torch"), "modkit")
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _edits_of_import_from(node, node.module, lines)


def _edits_of_import_from(node: ast.ImportFrom, module: str, lines: _Lines) -> Iterator[_Edit]:
    ours = [alias for alias in node.names if _root_of(f"{module}.{alias.name}")]
    others = [alias for alias in node.names if alias not in ours]
    if not ours:
        return
    start, end = lines.span(node)
    if not others:
        at = lines.text.index(b"torch", start)
        yield _Edit(at, at + len("torch"), "modkit")
        return
    # Two statements on as many lines as the one had.
    breaks = "\\\n" * lines.text[start:end].count(b"\n")
    theirs = f"from {module} import {breaks}{_names(others)}"
    yield _Edit(start, end, f"{theirs}; from {_ours(module)} import {_names(ours)}")


def _names(aliases: Iterable[ast.alias]) -> str:
    return ", ".join(ast.unparse(alias) for alias in aliases)


def _uses(tree: ast.Module) -> Iterator[tuple[ast.Name, str, str]]:
    """Yield each name that an attribute chain into a namespace starts with, and what replaces it."""
    bound = {"torch": "torch"}
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            bound.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    bound = {k: v for k, v in bound.items() if any(r.startswith(f"{v}.") for r in ROOTS)}
    parts: set[ast.AST] = set()
    for node in _walk(tree):
        if not isinstance(node, ast.Attribute) or node in parts:
            continue
        names: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.add(inner)
            names.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in bound:
            dotted = ".".join([bound[inner.id], *names])
            root = _root_of(dotted)
            assigned = dotted in ROOTS and not isinstance(node.ctx, ast.Load)
            if root and not assigned:
                yield inner, root, _ours(bound[inner.id])
