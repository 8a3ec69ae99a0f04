from pathlib import Path
from typing import Any

import torch

from tests.helpers import Implementation
from tests.integration.networks import (
    PICKLABLE,
    agree,
)


def test_whole_module_needs_no_private_classes(tmp_path: Path) -> None:
    """The classes to allow for a whole module are the same public ones as torch's."""

    def scenario(impl: Implementation) -> tuple[list[str], Any]:
        cls = PICKLABLE[impl.name]
        net = cls()
        torch.save(net, tmp_path / "net.pt")
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "net.pt")
        allowed = [type(module) for module in net.modules()]
        with torch.serialization.safe_globals([*allowed, set]):
            loaded = torch.load(tmp_path / "net.pt", weights_only=True)
        names = sorted(name.rpartition(".")[2].replace(cls.__name__, "Net") for name in unsafe)
        return names, dict(loaded.state_dict())

    names, _ = agree(scenario)

    assert "BatchNorm1d" in names
