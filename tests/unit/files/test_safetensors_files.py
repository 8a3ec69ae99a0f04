import sys

import pytest

from modkit.files.checkpoint_files import library


def test_a_library_that_is_missing_is_named(monkeypatch):
    """Without the package for a format the error says which one is needed."""
    monkeypatch.setitem(sys.modules, "safetensors", None)

    with pytest.raises(ImportError, match="need the package safetensors"):
        library("safetensors")
