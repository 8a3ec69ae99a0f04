import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import modkit
from modkit._messages import install_extra


ROOT = Path(__file__).resolve().parents[2]
# Imports all of modkit except what needs a package of its own, in the order of the names.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
import modkit
for module in pkgutil.walk_packages(modkit.__path__, "modkit."):
    if not module.name.startswith(("modkit.integrations.", "modkit.compat.pytest_plugin")):
        importlib.import_module(module.name)
        print(module.name)
"""


def read(name):
    """Return the text of a file in the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version_everywhere():
    """The version of the code is that of CITATION.cff and CHANGELOG.md; only a release has a date."""
    citation = read("CITATION.cff")
    cited = re.search(r"^version: (.*)", citation, re.MULTILINE)[1]
    date = re.search(r"^date-released: (.*)", citation, re.MULTILINE)

    assert modkit.__version__ == cited
    assert f"\n## {cited} ({date[1] if date else 'not released'})\n" in read("CHANGELOG.md")


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

    assert {"cli", "lightning", "transformers"} <= set(named)
    assert set(named) <= set(re.findall(r"^(\w+) = ", extras[1], re.MULTILINE))
    assert 'python -m pip install ".[cli]"' in install_extra("cli")


def installed_with(name, extra=""):
    """Return the names of the distributions that one needs, itself included."""
    needed = {canonicalize_name(name)}
    for line in requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            needed |= installed_with(requirement.name)
    return needed


def test_the_command_line_needs_no_package_that_its_extra_does_not_install():
    """All modules are imported where what is installed is torch and the packages of [cli]."""
    allowed = installed_with("torch-modkit", "cli")
    refused = [
        package
        for package, distributions in packages_distributions().items()
        if not allowed & set(map(canonicalize_name, distributions))
    ]
    assert "pytest" in refused

    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(refused)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "modkit.cli._commands" in done.stdout.split()
