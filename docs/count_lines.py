"""Write the code lines per capability into CONTRIBUTING.md: `python docs/count_lines.py`.

Code lines are those that are neither blank nor part of a comment or docstring. Words are free.
"""

import ast
import io
import re
import tokenize
from pathlib import Path


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
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


def code_lines(source: str) -> int:
    """Return the number of lines of Python code, without docstrings, comments and blank lines."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))

    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def shipped() -> dict[str, Path]:
    """Return all files of Python that a wheel has, by their path in the package."""
    return {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}


def count() -> dict[str, tuple[int, int]]:
    """Return the number of files and of code lines of each capability."""
    rest = shipped()
    found = {}
    for name, parts in CAPABILITIES.items():
        files = [
            f for f in rest if any(f == part or f.startswith(part and f"{part}/") for part in parts)
        ]
        lines = sum(code_lines(rest.pop(file).read_text(encoding="utf-8")) for file in files)
        found[name] = (len(files), lines)
    return found


def table() -> str:
    """Render the counts in Markdown, the largest first, with their sum."""
    rows = sorted(count().items(), key=lambda row: -row[1][1])
    total = tuple(map(sum, zip(*(numbers for _, numbers in rows), strict=True)))
    lines = [
        f"| {name} | {files} | {lines:,} |" for name, (files, lines) in [*rows, ("sum", total)]
    ]
    return "\n".join(["| capability | files | code lines |", "|---|--:|--:|", *lines])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    block = re.compile("(?<=<!-- lines -->\n\n).*?(?=\n\n<!-- end of lines -->)", re.DOTALL)
    PAGE.write_text(block.sub(lambda _: table(), text), encoding="utf-8")
