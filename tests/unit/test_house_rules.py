import ast
import re
import runpy
from pathlib import Path

from tests.cases import for_each


ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "modkit"
COUNTS = runpy.run_path(str(ROOT / "docs" / "count_lines.py"))
FILES = sorted(SOURCE.rglob("*.py"))

every_file = for_each("file", FILES, ids=[path.relative_to(SOURCE).as_posix() for path in FILES])


# Code lines of each folder. A bound only falls: raising one takes a commit that does nothing else,
# with its reason in the message. What a repair adds, it pays for in its own folder.
BOUNDS = {
    "averaging": 3_473,
    "files": 2_396,
    "compat": 1_945,
    "nn": 1_393,
    "top level": 1_493,
    "cli": 1_051,
    "migrations": 963,
    "jit": 895,
    "_fast_inference": 610,
    "models": 416,
    "integrations": 579,
    "optim": 330,
}
SUM = 15_544


def is_private(dotted):
    """Return True if a part of the dotted name starts with an underscore, except dunder names."""
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def private_torch_names(tree):
    """Yield the private names of torch that the code imports or reaches for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in names if name.startswith("torch.") and is_private(name))


@every_file
def test_private_names_of_torch_stand_in_one_file(file):
    """Only _upstream.py imports or reaches for names of torch that start with an underscore."""
    found = set(private_torch_names(ast.parse(file.read_text(encoding="utf-8"))))

    assert file.name == "_upstream.py" or found == set()


# How many private names of torch, and of what it holds, the two files use. It only falls.
PRIVATE_NAMES = {"_upstream.py": 33, "jit/_upstream.py": 13}


@for_each("name", PRIVATE_NAMES)
def test_private_names_of_torch_get_fewer(name):
    """Names that a release of torch can break without notice are counted: those with one underscore."""
    tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    own |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
    private = {part for part in found - own if part.startswith("_") and not part.startswith("__")}

    assert len(private) <= PRIVATE_NAMES[name]


@every_file
def test_files_and_functions_stay_short(file):
    """A file has at most 500 code lines, a function at most 60 lines besides its docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = {
        function.name: (function.end_lineno or 0)
        - function.lineno
        - (ast.get_docstring(function) or "").count("\n")
        for function in functions
    }

    assert COUNTS["count_lines"](file.read_text(encoding="utf-8")) <= 500
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_what_ships_stays_thin():
    """No folder has more code lines than its bound, and all have no more than the sum."""
    counts = COUNTS["count"]()

    assert {name: lines for name, lines in counts.items() if lines > BOUNDS[name]} == {}
    assert sum(counts.values()) <= SUM


def test_words_are_free():
    """Blank lines, comments and docstrings do not count as code; strings that are values do."""
    source = (
        '"""Page."""\n\n# Why.\ndef f():\n    """One.\n\n    Two.\n    """\n    return """a\nb"""\n'
    )

    assert COUNTS["count_lines"](source) == 3


def test_the_sessions_name_files_that_exist():
    """With workers, pytest runs nothing if a path is missing, and does not say which."""
    paths = re.findall(r'"((?:tests|examples)/[\w/.]+)"', (ROOT / "noxfile.py").read_text())

    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
