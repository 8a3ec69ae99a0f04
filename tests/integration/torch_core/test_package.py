import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.package import PackageExporter, PackageImporter, package_exporter

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.torchscript import scripted_tests


pytestmark = scripted_tests

SOURCE = """
import {library}.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return nn.functional.relu(self.layer(x))
"""


@pytest.fixture
def source(impl: Implementation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a user's file, which a package contains."""
    name = f"packaged_for_{impl}"
    (tmp_path / f"{name}.py").write_text(SOURCE.format(library=impl.name))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def packaged(source: Any, net: torch.nn.Module, *external: str) -> torch.nn.Module:
    """Write a network with its source to a package, and load it from there."""
    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.intern(source.__name__)
        for pattern in external:
            exporter.extern(pattern)
        exporter.save_pickle("net", "net.pkl", net)
    buffer.seek(0)
    return PackageImporter(buffer).load_pickle("net", "net.pkl")


def test_a_package_needs_no_pattern_for_the_library(source: Any) -> None:
    """A package imports the library from the environment without being told."""
    net, x = source.Net(), torch.ones(1, 2)

    assert torch.equal(packaged(source, net)(x), net(x))


@for_each("way", ["network", "scripted", "layers"])
def test_a_package_with_the_library_outside(
    impl: Implementation, source: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``extern`` for the library, networks and ScriptModules are packaged and loaded."""
    net, x = source.Net(), torch.ones(1, 2)
    make = {
        "network": lambda: net,
        "scripted": lambda: impl.jit.script(net),
        "layers": lambda: torch.nn.Sequential(net),
    }
    # Torch's flag of a beta feature: ScriptModules in packages.
    monkeypatch.setattr(package_exporter, "_gate_torchscript_serialization", False)
    loaded = packaged(source, make[way](), f"{impl}.**")

    assert torch.equal(loaded(x), net(x))
    # The class comes from the source in the package.
    assert not isinstance(loaded, source.Net)
