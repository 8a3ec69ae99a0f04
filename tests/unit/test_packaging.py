import re
from pathlib import Path

import modkit
from modkit._messages import install_extra


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
    """The version of the code is that of CITATION.cff, with its date in CHANGELOG.md."""
    cited = re.search(r"^version: (.*)", read("CITATION.cff"), re.MULTILINE)[1]
    date = re.search(r"^date-released: (.*)", read("CITATION.cff"), re.MULTILINE)[1]

    assert modkit.__version__ == cited
    assert f"\n## {cited} ({date})\n" in read("CHANGELOG.md")


def test_hints_name_extras_that_exist():
    """Every extra that an error names is one of pyproject.toml, and is installed from a checkout."""
    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\n", read("pyproject.toml"), re.DOTALL
    )
    named = [
        extra
        for file in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"install_extra\(['\"](\w+)", file.read_text(encoding="utf-8"))
    ]

    assert {"cli", "plot", "lightning", "transformers"} <= set(named)
    assert set(named) <= set(re.findall(r"^(\w+) = ", extras[1], re.MULTILINE))
    assert 'python -m pip install ".[cli]"' in install_extra("cli")
