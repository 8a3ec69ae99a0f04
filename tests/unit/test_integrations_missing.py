import importlib
import sys

import pytest


@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_transformers_is_missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Without a package that the callback needs, the error says how to install both."""
    # None there makes a package one that cannot be found.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "modkit.integrations.transformers", raising=False)

    with pytest.raises(
        ModuleNotFoundError, match=r"pip install 'modkit\[transformers\]'"
    ) as caught:
        importlib.import_module("modkit.integrations.transformers")
    assert caught.value.name in {"accelerate", "transformers"}
