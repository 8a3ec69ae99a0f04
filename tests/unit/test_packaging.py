import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def read(name):
    """Return the text of a file in the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_hooks_mirror_the_lint_session():
    """The hooks of .pre-commit-config.yaml run the commands of `nox -s lint`, in that order."""
    session = read("noxfile.py").partition("def lint(")[2].partition("@nox")[0]
    commands = [
        " ".join(re.findall(r'"([^"]+)"', call.partition(", env=")[0]))
        for call in re.findall(r"session\.run\((.*)\)", session)
    ]
    hooks = re.findall(r"entry: (?:env PYTHONPATH=src )?(.*)", read(".pre-commit-config.yaml"))

    assert commands == hooks


def test_one_version_everywhere():
    """The version is equal in pyproject.toml and CITATION.cff, with its date in CHANGELOG.md."""
    version = re.search(r'^version = "(.*)"', read("pyproject.toml"), re.MULTILINE)[1]
    cited = re.search(r"^version: (.*)", read("CITATION.cff"), re.MULTILINE)[1]
    date = re.search(r"^date-released: (.*)", read("CITATION.cff"), re.MULTILINE)[1]

    assert version == cited
    assert f"\n## {version} ({date})\n" in read("CHANGELOG.md")
