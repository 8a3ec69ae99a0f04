import ast
import functools
import runpy
from pathlib import Path

from tests.cases import for_each


ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "modkit"
COUNTS = runpy.run_path(str(ROOT / "docs" / "count_lines.py"))
FILES = sorted(SOURCE.rglob("*.py"))

every_file = for_each("file", FILES, ids=[path.relative_to(SOURCE).as_posix() for path in FILES])


@functools.cache
def lines_of(file):
    """Return how many lines of each sort a file has."""
    return COUNTS["count_lines"](file.read_text(encoding="utf-8"))


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

    assert lines_of(file).code <= 500
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_what_ships_stays_thin():
    """At most 17,630 code lines in 125 files. The aim is 11,400: what merges mechanisms is welcome."""
    files = COUNTS["shipped"]().values()

    assert sum(lines_of(file).code for file in files) <= 17_630
    assert len(files) <= 125


def test_words_are_free():
    """Blank lines, comments and docstrings do not count as code; strings that are values do."""
    source = (
        '"""Page."""\n\n# Why.\ndef f():\n    """One.\n\n    Two.\n    """\n    return """a\nb"""\n'
    )

    assert COUNTS["count_lines"](source) == (3, 4, 1)


def test_the_table_of_sizes_has_every_line():
    """CONTRIBUTING.md has a row for each capability, and columns for code, docstrings and comments."""
    rows = COUNTS["table"]().splitlines()
    shipped = COUNTS["shipped"]().values()
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

    assert rows[0] == "| capability | files | code | docstring | comment |"
    assert rows[0] in page
    assert [row.split("|")[1] for row in rows if row.split("|")[1] not in page] == []
    total = [int(number.replace(",", "")) for number in rows[-1].split("|")[2:-1]]
    assert total == [len(shipped), *map(sum, zip(*map(lines_of, shipped), strict=True))]


@for_each("page", sorted(SOURCE.rglob("README.md")), ids=lambda p: p.parent.name)
def test_each_file_has_its_line(page):
    """A folder's README names its files, those of smaller folders included."""
    text = page.read_text(encoding="utf-8")
    pages = SOURCE.rglob("README.md")
    own_pages = {each.parent for each in pages if page.parent in each.parent.parents}
    # The layers have torch's file names, and the last row of a table may stand for many files.
    whole = {"modules", *(name for name in ("cli",) if f"{name}/_*.py" in text)}
    names = [
        path.relative_to(page.parent).as_posix()
        for path in page.parent.rglob("*.py")
        if not own_pages & set(path.parents) and path.name != "__init__.py"
        if not whole & set(path.relative_to(page.parent).parts[:-1])
    ]

    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
