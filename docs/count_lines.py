"""Print the code lines of each folder of `src/modkit`: `python docs/count_lines.py`.

Code lines are those that are neither blank nor part of a comment or docstring. Each folder has a
bound, which `tests/unit/test_house_rules.py` holds; docstrings and comments have none.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path


SOURCE = Path(__file__).resolve().parents[1] / "src" / "modkit"
# Tokens of lines that hold no code. A docstring is an expression of its own, found in the tree.
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def count_lines(source: str) -> int:
    """Return the number of code lines of a file."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))

    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def folder_of(path: Path) -> str:
    """Return the folder that a file counts for."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "top level"


def count() -> dict[str, int]:
    """Return the number of code lines of each folder, the largest first."""
    counts: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        counts[folder_of(path)] += count_lines(path.read_text(encoding="utf-8"))
    return dict(counts.most_common())


if __name__ == "__main__":
    found = count()
    for folder, lines in [*found.items(), ("sum", sum(found.values()))]:
        sys.stdout.write(f"{folder:16}{lines:7,}\n")
