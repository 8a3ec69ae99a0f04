import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def test_each_term_is_found():
    """The expression in pyproject.toml matches every term of docs/terms.txt."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^regex = '''(.*?)'''", settings, re.DOTALL | re.MULTILINE)
    expression = re.compile(found[1])
    lines = (ROOT / "docs" / "terms.txt").read_text(encoding="utf-8").splitlines()
    terms = [line.split("->")[0] for line in lines]
    # Some are matched only after a number, or with a capital.
    matches = {
        match.group().lower()
        for term in terms
        for text in (f"1{term}", term, re.sub("[a-z]", lambda m: m[0].upper(), term, count=1))
        for match in expression.finditer(text)
    }

    assert set(terms) == matches
