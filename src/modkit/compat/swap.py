"""``swap_source``: make Python source use modkit where it uses ``torch.nn``."""

import ast
import importlib.util
import sys
from collections.abc import Iterator


# The namespaces that modkit has, too.
ROOTS = ("torch.nn", "torch.jit", "torch.optim.swa_utils")
# Start, end and replacement, in bytes of the source.
Edit = tuple[int, int, str]


def swap_source(source: str) -> str:
    """Return the source with modkit in place of ``torch.nn``, ``torch.jit`` and ``swa_utils``.

    Imports and attribute chains are rewritten, so ``import torch.nn as nn`` becomes ``import
    modkit.nn as nn``, and ``torch.nn.Linear`` becomes ``modkit.nn.Linear``. Every statement stays
    on its line. Names that modkit lacks are not changed, and neither are strings, such as the
    target of ``mock.patch``; before Python 3.12, that holds for f-strings, too.

    Example:
        >>> print(swap_source("from torch import nn, optim"))
        from torch import optim; from modkit import nn
    """
    tree = ast.parse(source)
    # Syntax trees count columns in bytes.
    content = source.encode()
    lines = _Lines(content)
    uses = list(_uses(tree))

    edits = {*_edits_of_imports(tree, lines)}
    edits |= {(*lines.span(name), replacement) for name, _, replacement in uses}
    needed = {_ours(root) for _, root, _ in uses}
    if needed:
        edits.add(lines.import_at_top(tree, f"import {', '.join(sorted(needed))}"))

    # From the end on, so that the positions before an edit stay.
    for start, end, new in sorted(edits, reverse=True):
        content = content[:start] + new.encode() + content[end:]
    return content.decode()


def _ours(dotted: str) -> str:
    """Return the name of modkit for one of torch."""
    return "modkit" + dotted.removeprefix("torch")


def _root_of(dotted: str) -> str | None:
    """Return the namespace of a dotted name of torch, if modkit has that name."""
    for root in ROOTS:
        if dotted == root:
            return root
        if dotted.startswith(f"{root}."):
            name = dotted.removeprefix(f"{root}.").partition(".")[0]
            ours = importlib.import_module(_ours(root))
            inside = f"{_ours(root)}.{name}" if hasattr(ours, "__path__") else ""
            if name == "*" or hasattr(ours, name) or (inside and importlib.util.find_spec(inside)):
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
        """Return where the text of a node starts and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def import_at_top(self, tree: ast.Module, statement: str) -> Edit:
        """Return the edit that imports below the docstring and ``__future__``."""
        before = int(ast.get_docstring(tree, clean=False) is not None)
        while getattr(tree.body[before], "module", None) == "__future__":
            before += 1

        if before:
            _, end = self.span(tree.body[before - 1])
            return end, end, f"; {statement}"
        first = tree.body[0]
        if not hasattr(first, "body") and not hasattr(first, "cases"):
            start, _ = self.span(first)
            return start, start, f"{statement}; "

        # In front of a compound statement, on the line above it, which is blank or a comment.
        line = min(node.lineno for node in [first, *getattr(first, "decorator_list", [])])
        if line > 1:
            return self.starts[line - 2], self.starts[line - 2], f"{statement}  "
        return 0, 0, f"{statement}\n"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes with a correct position: before Python 3.12, not those in f-strings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if sys.version_info >= (3, 12) or not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _edits_of_imports(tree: ast.Module, lines: _Lines) -> Iterator[Edit]:
    """Yield the edits of statements that import from a namespace."""
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import torch.nn` binds `torch`, which other names may need.
                if alias.asname is not None and _root_of(alias.name):
                    start, _ = lines.span(alias)
                    yield start, start + len("torch"), "modkit"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            ours = [alias for alias in node.names if _root_of(f"{node.module}.{alias.name}")]
            others = [alias for alias in node.names if alias not in ours]
            start, end = lines.span(node)

            if ours and others:
                # Two statements on as many lines as the one had.
                breaks = "\\\n" * lines.text[start:end].count(b"\n")
                of_torch = ", ".join(map(ast.unparse, others))
                of_modkit = ", ".join(map(ast.unparse, ours))
                first = f"from {node.module} import {breaks}{of_torch}"
                yield start, end, f"{first}; from {_ours(node.module)} import {of_modkit}"
            elif ours:
                at = lines.text.index(b"torch", start)
                yield at, at + len("torch"), "modkit"


def _uses(tree: ast.Module) -> Iterator[tuple[ast.Name, str, str]]:
    """Yield each name that an attribute chain into a namespace starts with.

    With it come the namespace, and the replacement of the name.
    """
    bound = {"torch": "torch"}
    # Names that imports bind anywhere in the file, whatever their scope.
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            bound.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    bound = {k: v for k, v in bound.items() if any(r.startswith(f"{v}.") for r in ROOTS)}

    inner_chains: set[ast.AST] = set()
    for node in _walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner_chains:
            continue

        names: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            inner_chains.add(inner)
            names.insert(0, inner.attr)
            inner = inner.value

        if isinstance(inner, ast.Name) and inner.id in bound:
            dotted = ".".join([bound[inner.id], *names])
            root = _root_of(dotted)
            # Assigning to ``torch.nn`` itself must not assign to modkit.
            assigned = dotted in ROOTS and not isinstance(node.ctx, ast.Load)
            if root and not assigned:
                yield inner, root, _ours(bound[inner.id])
