import importlib
import inspect
import re
from pathlib import Path

import pytest


PAGE = Path(__file__).resolve().parents[3] / "docs" / "api" / "index.md"
LISTED = re.findall(r"^   (modkit\.[\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
MODULES = ["distributed", "errors", "files", "models", "optim.swa_utils", "posthoc", "schedules"]


def found_at(path):
    """Return a public object by the path that users import it from."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["modkit", *(f"modkit.{name}" for name in MODULES)])
def test_each_public_name_is_listed(module):
    """The tables have all names of a module; `modkit.nn` and `modkit.jit` have torch's."""
    public = importlib.import_module(module).__all__
    names = {
        f"{module}.{name}" for name in public if not inspect.ismodule(found_at(f"{module}.{name}"))
    }

    assert names <= set(LISTED)
    assert len(set(LISTED)) == len(LISTED)


@pytest.mark.parametrize("path", [path for path in LISTED if ".integrations." not in path])
def test_each_listed_name_says_what_it_is_for(path):
    """The first sentence of the docstring, which is its line in the table, is short."""
    first = (found_at(path).__doc__ or "").split("\n\n")[0]

    assert 10 < len(first) < 250
