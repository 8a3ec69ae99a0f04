import importlib
import importlib.util
import sys

import pytest

from modkit._messages import install_extra


@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_transformers_is_missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Without a package that the callback needs, the error says how to install both."""
    # None there makes a package one that cannot be found.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "modkit.integrations.transformers", raising=False)

    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("modkit.integrations.transformers")
    assert caught.value.msg == (
        "modkit.integrations.transformers needs transformers 5 or later and accelerate. "
        + install_extra("transformers")
    )
    assert caught.value.name in {"accelerate", "transformers"}


def test_lightning_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Lightning, the error says how to install it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "modkit.integrations.lightning", raising=False)

    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("modkit.integrations.lightning")
    assert caught.value.msg == (
        f"modkit.integrations.lightning needs Lightning 2.6 or later. {install_extra('lightning')}"
    )
    assert caught.value.name == "lightning"
