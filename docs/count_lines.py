"""Write the lines per capability into CONTRIBUTING.md: `python docs/count_lines.py`.

Code lines are those that are neither blank nor part of a comment or docstring. They have a limit;
docstrings and comments have none.
"""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "modkit"
PAGE = ROOT / "CONTRIBUTING.md"
# Files and folders of each capability. Everything else counts as the foundation.
CAPABILITIES = {
    "`Module`": ("nn",),
    "`EMA`, schedules, `EMACallback`, `PostHocEMA`": ("averaging", "schedules.py", "posthoc.py"),
    "`torch.optim.swa_utils`": ("optim",),
    "sharded averages": ("distributed.py",),
    "Lightning, transformers": ("integrations",),
    "migrations": ("migrations",),
    "TorchScript": ("jit",),
    "checkpoints and other files": ("files", "checkpoints.py"),
    "`fast_inference`": ("fast_inference",),
    "EfficientZero": ("models",),
    "`modkit compat`": ("compat", "cli/compat.py"),
    "other commands": ("cli", "__main__.py"),
    "foundation": ("",),
}


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


class Lines(NamedTuple):
    """The number of lines of each sort. A line of code with a comment behind it is both."""

    code: int
    docstring: int
    comment: int


def sort_lines(source: str) -> tuple[set[int], set[int], dict[int, int]]:
    """Return the numbers of the lines of code, of those of docstrings, and of those with a comment.

    A comment comes with the column that it begins at.
    """
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))

    code: set[int] = set()
    commented: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            commented[token.start[0]] = token.start[1]
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - documented, documented, commented


def count_lines(source: str) -> Lines:
    """Count the lines of a file; blank lines, also those in docstrings, are of no sort."""
    written = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    code, documented, commented = sort_lines(source)
    return Lines(len(code), len(documented & written), len(commented))


def code_of(source: str) -> str:
    """Return the lines of code of a file, without the comments behind them."""
    code, _, commented = sort_lines(source)
    lines = enumerate(source.splitlines(), 1)
    return "\n".join(
        line[: commented.get(number)].rstrip() for number, line in lines if number in code
    )


def shipped() -> dict[str, Path]:
    """Return all files of Python that a wheel has, by their path in the package."""
    return {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}


def count() -> dict[str, tuple[int, ...]]:
    """Return the number of files and of lines of each sort, of each capability."""
    remaining = shipped()
    counts: dict[str, tuple[int, ...]] = {}
    for name, folders in CAPABILITIES.items():
        # The foundation is the empty prefix: all files that are left.
        prefixes = tuple(f"{folder}/" if folder else "" for folder in folders)
        files = [file for file in remaining if file in folders or file.startswith(prefixes)]

        lines = [count_lines(remaining.pop(file).read_text(encoding="utf-8")) for file in files]
        counts[name] = (len(files), *map(sum, zip(*lines, strict=True)))
    return counts


def table() -> str:
    """Render the counts in Markdown, the largest first, with their sum."""
    rows = sorted(count().items(), key=lambda row: -row[1][1])
    total = tuple(map(sum, zip(*(numbers for _, numbers in rows), strict=True)))

    lines = ["| capability | files | code | docstring | comment |", "|---|--:|--:|--:|--:|"]
    for name, numbers in [*rows, ("sum", total)]:
        lines.append(" | ".join([f"| {name}", *(f"{number:,}" for number in numbers)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    block = re.compile("(?<=<!-- lines -->\n\n).*?(?=\n\n<!-- end of lines -->)", re.DOTALL)
    PAGE.write_text(block.sub(lambda _: table(), page), encoding="utf-8")
